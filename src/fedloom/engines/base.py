"""The interface between the round loop and the engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from fedloom.clients.messages import Participant, Post, Reply, Site, Work
from fedloom.network.bound_method import Bound
from fedloom.spec.parts import Program


class Problem(Protocol):
    """The parts of a run that an engine may read before it begins: methods, options and rows, no rounds.

    :class:`fedloom.rounds.run.Run` is one.
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
    """Interface of the engines. All engines return the loop engine's replies, up to rounding."""

    name: str

    def run_cohort(
        self, bound: Bound, work: Work, program: Program, post: Post, participants: Sequence[Participant]
    ) -> list[Reply]:
        """Run a program for every client of a cohort.

        Args:
            bound: the method, bound to the model.
            work: the options of the clients, equal for all.
            program: the steps, for example ``schedule.round``.
            post: the server's message to all clients.
            participants: the clients, each with its rows, state and private message.

        Returns:
            One reply per client, in order.
        """

    def prefetch(self, bound: Bound, work: Work, round: int, participants: Callable[[], Sequence[Participant]]) -> None:
        """Prepare the next round while the device may still run this one. Results do not change.

        Args:
            bound: the method of the next round.
            work: the options of the clients.
            round: the number of the next round.
            participants: draws its clients, without their states. Call it only if it is needed.
        """
        return None
