"""The engine seam: one method."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from fedloom.bound import Bound
from fedloom.slots import Program
from fedloom.work import Participant, Post, Reply, Work


class Engine(Protocol):
    """Runs a program for a cohort. Whatever the engine, the replies are the loop engine's."""

    name: str

    def run_cohort(
        self, bound: Bound, work: Work, program: Program, post: Post, participants: Sequence[Participant]
    ) -> list[Reply]:
        """One reply per participant, in the order given."""
