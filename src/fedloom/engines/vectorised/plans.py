"""Steps planned ahead: while the device is at work on a round, the host decides which rows make up the next one."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from fedloom.batches import Steps
from fedloom.bound import Bound, BoundPhase
from fedloom.engines.loop import planned
from fedloom.work import Participant, Site, Work


class Plans:
    """The steps of clients, made when they are asked for unless they were foreseen."""

    def __init__(self) -> None:
        self._ahead: dict[Hashable, tuple[Site, Steps]] = {}
        self._what: tuple[Bound, Work, int] | None = None

    def foresee(self, bound: Bound, work: Work, round: int, people: Sequence[Participant]) -> None:
        """Plans a round to come; what was foreseen before and not asked for is forgotten."""
        phases = [bound.phases[p.name] for p in bound.method.phases("round")]
        self._what = (bound, work, round)
        self._ahead = {
            _key(phase, person): (person.site, planned(bound, work, round, phase, person))
            for phase in phases
            for person in people
        }

    def of(self, bound: Bound, work: Work, round: int, phase: BoundPhase, person: Participant) -> Steps:
        """The steps of a client in a phase, as :func:`fedloom.engines.loop.planned` has them."""
        what = self._what
        if what is not None and what[0] is bound and what[1] is work and what[2] == round:
            found = self._ahead.pop(_key(phase, person), None)
            if found is not None:
                return found[1]
        return planned(bound, work, round, phase, person)


def _key(phase: BoundPhase, person: Participant) -> Hashable:
    """A site by its identity, and not by its name, which a run of some of its rows has too."""
    return phase.phase.name, id(person.site), person.share
