"""Prefetch the first batches of the next round while the device still runs the present one."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

from fedloom.clients.messages import Participant, Work
from fedloom.clients.runner import planned
from fedloom.engines.vectorised.rows import KEPT_BYTES, RowCache, WaveSchedule, nbytes, training_schedule
from fedloom.gpu.batch_buffers import BatchBuffers
from fedloom.network.bound_method import Bound, BoundPhase
from fedloom.spec.parts import Phase, Program


class BatchPrefetcher:
    """Schedules the first phase of a round for its first wave before the round begins.

    Args:
        rows: joined rows of waves.
        batches: the buffers that captured steps read.
    """

    def __init__(self, rows: RowCache, batches: BatchBuffers) -> None:
        self.rows, self.batches = rows, batches
        self._next: tuple[_Key, str, WaveSchedule] | None = None

    def prefetch(self, bound: Bound, work: Work, round: int, wave: Sequence[Participant]) -> None:
        """Compute the schedule and copy its first batches. Replace what was prefetched before."""
        self._next = None
        phases, parts = bound.method.phases("round"), [p.site.train for p in wave]
        if not phases or phases[0].until is not None or sum(map(nbytes, parts)) > KEPT_BYTES // 4:
            return
        phase = bound.phases[phases[0].name]
        steps = [planned(bound, work, round, phase, p) for p in wave]
        schedule = training_schedule(self.rows.of(parts), steps, bound.structure.dtype, "narrow")
        buffer = self.batches.get(schedule)
        if buffer is not None and schedule.slots:
            buffer.load(schedule, 0)
        # Last: nothing holds the schedule if memory runs out before.
        self._next = (_Key(bound, work, round, phase, wave), phase.phase.name, schedule)

    def take(
        self, bound: Bound, work: Work, round: int, program: Program, wave: Sequence[Participant]
    ) -> Mapping[str, WaveSchedule]:
        """Return the schedule by its phase, once, if it is of this program, round and wave."""
        if self._next is None:
            return {}
        key, name, schedule = self._next
        trains = any(isinstance(step, Phase) and step.name == name for step in program)
        if not trains or not key.matches(_Key(bound, work, round, bound.phases[name], wave)):
            return {}
        self._next = None
        return {name: schedule}

    def clear(self) -> None:
        """Drop what was prefetched."""
        self._next = None


class _Key:
    """The phase, round and wave of a schedule.

    It holds the objects that it compares: their addresses cannot be given to other objects.
    """

    def __init__(self, bound: Bound, work: Work, round: int, phase: BoundPhase, wave: Sequence[Participant]) -> None:
        self.objects = (bound, work, phase, *(p.site for p in wave))
        self.numbers = (round, *(p.share for p in wave))

    def matches(self, other: _Key) -> bool:
        """Compare objects by identity and numbers by value."""
        same = len(self.objects) == len(other.objects)
        same = same and all(map(operator.is_, self.objects, other.objects))
        return same and self.numbers == other.numbers
