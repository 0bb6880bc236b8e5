"""The batches of the next round's first steps, laid out while the device still works on the present round."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

from fedloom.bound import Bound, BoundPhase
from fedloom.clients.runner import planned
from fedloom.engines.vectorised.buffers import BatchBuffers
from fedloom.engines.vectorised.rows import KEPT_BYTES, RowCache, WaveSchedule, nbytes, training_schedule
from fedloom.slots import Phase, Program
from fedloom.work import Participant, Work


class Prefetched:
    """The schedule of the first phase of a round to come, for its first wave.

    Args:
        rows: joined rows of waves.
        batches: where captured steps find their batches.
    """

    def __init__(self, rows: RowCache, batches: BatchBuffers) -> None:
        self.rows, self.batches = rows, batches
        self._next: tuple[_Key, str, WaveSchedule] | None = None

    def prefetch(self, bound: Bound, work: Work, round: int, wave: Sequence[Participant]) -> None:
        """Lays out the schedule and its first batches. Replaces what was prefetched before."""
        self._next = None
        phases, parts = bound.method.phases("round"), [p.site.train for p in wave]
        if not phases or phases[0].until is not None or sum(map(nbytes, parts)) > KEPT_BYTES // 4:
            return
        phase = bound.phases[phases[0].name]
        steps = [planned(bound, work, round, phase, p) for p in wave]
        schedule = training_schedule(self.rows.of(parts), steps, bound.structure.dtype, "narrow")
        self._next = (_Key(bound, work, round, phase, wave), phase.phase.name, schedule)
        buffer = self.batches.known_of(schedule)
        if buffer is not None and schedule.slots:
            buffer.load(schedule, 0)

    def take(
        self, bound: Bound, work: Work, round: int, program: Program, wave: Sequence[Participant]
    ) -> Mapping[str, WaveSchedule]:
        """The schedule by the name of its phase, if it is of this program, round and wave; it is given once."""
        if self._next is None:
            return {}
        key, name, schedule = self._next
        trains = any(isinstance(step, Phase) and step.name == name for step in program)
        if not trains or not key.matches(_Key(bound, work, round, bound.phases[name], wave)):
            return {}
        self._next = None
        return {name: schedule}

    def clear(self) -> None:
        """Forgets what was prefetched."""
        self._next = None


class _Key:
    """Which steps were prefetched. Holds the objects that it compares, so that none of them can be replaced by another."""

    def __init__(self, bound: Bound, work: Work, round: int, phase: BoundPhase, wave: Sequence[Participant]) -> None:
        self.objects = (bound, work, phase, *(p.site for p in wave))
        self.numbers = (round, *(p.share for p in wave))

    def matches(self, other: _Key) -> bool:
        """Whether they are the steps of the same phase, round and wave."""
        same = len(self.objects) == len(other.objects) and all(map(operator.is_, self.objects, other.objects))
        return same and self.numbers == other.numbers
