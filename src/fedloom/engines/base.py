"""What the round loop asks of an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from fedloom.bound import Bound
from fedloom.slots import Program
from fedloom.work import Participant, Post, Reply, Site, Work


class Problem(Protocol):
    """The parts of a run that an engine may read before it begins: methods, options and rows, no rounds.

    :class:`fedloom.run.Run` is one.
    """

    @property
    def bound(self) -> Bound:
        """The bound method of the first rounds."""

    @property
    def later(self) -> Mapping[int, Bound]:
        """The bound methods that follow, by the round after which each begins."""

    @property
    def work(self) -> Work:
        """The options of the clients' work."""

    @property
    def sites(self) -> Mapping[str, Site]:
        """The clients with their rows."""


class Engine(Protocol):
    """Runs a program for a cohort. Whatever the engine, the replies are the loop engine's."""

    name: str

    def run_cohort(
        self, bound: Bound, work: Work, program: Program, post: Post, participants: Sequence[Participant]
    ) -> list[Reply]:
        """One reply per participant, in the order given."""

    def prefetch(self, bound: Bound, work: Work, round: int, participants: Callable[[], Sequence[Participant]]) -> None:
        """A hint, given while the device may still run a round: the clients of the next one. Changes no number.

        Args:
            bound: the method of the next round.
            work: how clients work.
            round: the next round.
            participants: draws its clients, without what they keep: call it only where there is something to prepare.
        """
        return None
