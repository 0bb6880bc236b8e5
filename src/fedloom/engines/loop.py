"""The loop engine: runs clients one after another. It is the reference for the other engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fedloom.clients.messages import Participant, Post, Reply, Work
from fedloom.clients.runner import ClientRunner
from fedloom.engines.base import Engine
from fedloom.network.bound_method import Bound
from fedloom.spec.parts import Program


class LoopEngine(Engine):
    """Runs a :class:`ClientRunner` for each client in turn.

    Args:
        single: whether to compute with one thread. Worker processes do.
    """

    name = "loop"

    def __init__(self, *, single: bool = False) -> None:
        self.single = single

    def run_cohort(
        self, bound: Bound, work: Work, program: Program, post: Post, participants: Sequence[Participant]
    ) -> list[Reply]:
        """Run a program for each client and return one reply per client, in order."""
        before = torch.get_num_threads()
        if self.single and before != 1:
            torch.set_num_threads(1)
        try:
            replies = []
            for person in participants:
                client = ClientRunner(bound, work, post, [person])
                client.run(program)
                replies += client.replies()
            return replies
        finally:
            if torch.get_num_threads() != before:
                torch.set_num_threads(before)

    def facts(self) -> dict[str, Any]:
        """Return the facts for the run's record."""
        return {"engine": self.name, "workers": 0, "events": []}
