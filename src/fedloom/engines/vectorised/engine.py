"""The vectorised engine: trains waves of clients as stacked tensors."""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Literal, Protocol

import torch

from fedloom import devices
from fedloom.clients.arrangement import BatchSchedule
from fedloom.clients.inputs import ClientInputs
from fedloom.clients.messages import Participant, Post, Reply, Work
from fedloom.clients.runner import ClientRunner
from fedloom.clients.step import EagerRunner, PhaseStart, ScheduleOf, StartSteps, Step, StepRunner, start_eager
from fedloom.clients.sweep import Accumulate, add_up
from fedloom.engines.base import Engine
from fedloom.engines.load import load
from fedloom.engines.vectorised import waves
from fedloom.engines.vectorised.arrangement import ManyClients
from fedloom.engines.vectorised.compiled import start_compiled
from fedloom.engines.vectorised.first_round import FirstRound, Reached
from fedloom.engines.vectorised.rows import SWEEP_GRAIN, RowCache
from fedloom.engines.vectorised.traced import TRACE_STEPS, TracedGradients, Traces
from fedloom.errors import FedloomError, RunError, UserError
from fedloom.network.bound_method import Bound
from fedloom.spec.parts import Program

StepKind = Literal["auto", "mapped", "traced", "compiled", "graphed"]


class WaveRunners(Protocol):
    """What executes the steps of a wave, and what adds up its sweeps."""

    start: StartSteps
    accumulate: Accumulate


class StepCapture(Protocol):
    """Interface of the GPU package: captured steps and sweeps of a run, and prefetched batches.

    :mod:`fedloom.gpu.captured_steps` implements it.
    """

    notes: list[str]

    def wave(self) -> WaveRunners:
        """Return what runs the phases and sweeps of one wave."""

    def prefetch(self, bound: Bound, work: Work, round: int, wave: Sequence[Participant]) -> None:
        """Prefetch the batches of the first phase of a round. Changes no number."""

    def take_schedules(
        self, bound: Bound, work: Work, round: int, program: Program, wave: Sequence[Participant]
    ) -> Mapping[str, BatchSchedule]:
        """Return the prefetched schedules of a program by their phases."""

    def clear(self) -> None:
        """Drop all tensors and graphs."""


class VectorisedEngine(Engine):
    """Runs waves of clients, stacked along axis 0.

    Args:
        step: how steps run: ``"mapped"`` (vmap and autograd), ``"traced"`` (the same operations
            without Python between them), ``"compiled"`` (compiled by inductor), ``"graphed"`` (CUDA
            graphs), or ``"auto"``: graphed on CUDA, elsewhere traced if the run is long enough.
        wave: most clients of a wave; default: the rule of :mod:`fedloom.engines.vectorised.waves`.
        otherwise: called with the error if clients cannot be stacked; returns the engine that takes
            over, and the reason.

    Attributes:
        events: messages, one each time that memory ran out.
        told: called with the changes of the plan (smaller waves, another engine), before the retry.
        instead: the engine that has taken over.
    """

    name = "vectorised"

    def __init__(
        self,
        *,
        step: StepKind = "auto",
        wave: int | None = None,
        otherwise: Callable[[Exception], tuple[Engine, str]] | None = None,
    ) -> None:
        if step not in ("auto", "mapped", "traced", "compiled", "graphed"):
            raise UserError(f"step={step!r}: expected auto, mapped, traced, compiled or graphed")
        self.step, self.wave = step, wave
        self.rows = RowCache()
        self.traces = None if step == "mapped" else Traces(TRACE_STEPS if step == "auto" else 1, step == "compiled")
        self.captured: StepCapture | None = None
        self.reached: Reached = {}
        self._sizes: dict[Hashable, tuple[Bound, Work, int]] = {}
        self.events: list[str] = []
        self.told: Callable[[dict[str, Any]], None] | None = None
        self.otherwise = otherwise
        self.instead: Engine | None = None

    def run_cohort(
        self, bound: Bound, work: Work, program: Program, post: Post, participants: Sequence[Participant]
    ) -> list[Reply]:
        """Run a program wave by wave and return one reply per client, in order."""
        if self.instead is not None:
            return self.instead.run_cohort(bound, work, program, post, participants)
        replies: dict[str, Reply] = {}
        for wave in self._waves(bound, work, participants):
            replies |= {r.id: r for r in self._wave(bound, work, program, post, wave)}
        return [replies[p.site.id] for p in participants]

    def prefetch(self, bound: Bound, work: Work, round: int, participants: Callable[[], Sequence[Participant]]) -> None:
        """Prefetch the first batches of the next round if steps are captured. A CPU would gain nothing."""
        captured = self._captured_steps(bound.network.device)
        if self.instead is not None or captured is None:
            return
        people = participants()
        if people:
            wave = self._waves(bound, work, people)[0]
            try:
                captured.prefetch(bound, work, round, wave)
            except torch.OutOfMemoryError:  # there is room once the replies of this round are gone
                self.rows.clear()

    def _waves(self, bound: Bound, work: Work, people: Sequence[Participant]) -> list[list[Participant]]:
        return waves.cut(bound, people, self.wave or self._most(bound, work, people))

    def _most(self, bound: Bound, work: Work, people: Sequence[Participant]) -> int:
        rows = max([len(p.site.train) for p in people])
        key = (id(bound), id(work), rows)
        if key not in self._sizes:
            kind = devices.device_kind(bound.network.device.torch_device)
            self._sizes = {key: (bound, work, waves.wave_size(bound, work, rows, kind))}
        return self._sizes[key][2]

    @property
    def notes(self) -> list[str]:
        """The steps that could not be traced, compiled or captured, with the reasons."""
        return [note for store in (self.traces, self.captured) if store is not None for note in store.notes]

    def facts(self) -> dict[str, Any]:
        """Return what was resolved, and the events since then."""
        name = self.name if self.instead is None else self.instead.name
        return {"engine": name, "step": self.step, "wave": self.wave or 0, "events": [*self.events, *self.notes]}

    def _captured_steps(self, device: devices.Device) -> StepCapture | None:
        """Return the captured steps of the run; None where steps are not captured.

        With ``step="auto"`` they are captured on CUDA, if the GPU package is loaded.
        """
        automatic = self.step == "auto" and device.has_gpu_package and devices.is_gpu(device.torch_device)
        if self.captured is None and (self.step == "graphed" or automatic):
            self.captured = load("gpu.captured_steps").CapturedSteps(self.rows)
        return self.captured

    def _runners(self, work: Work, captured: StepCapture | None) -> tuple[StartSteps, Accumulate]:
        """Return what executes the steps of a phase, and what adds up sweeps."""
        traces = self.traces
        if captured is not None:
            wave = captured.wave()
            return wave.start, wave.accumulate
        if traces is None:
            return start_eager, add_up

        def start(step: Step, start: PhaseStart, inputs: ClientInputs, schedule: ScheduleOf) -> StepRunner:
            phase = step.phase.phase
            steps: Any = None
            name = (step.bound, phase.name, inputs.facts.get("key"))
            compiled = traces.compiled and phase.until is None and not work.keep_optimizer
            if compiled:
                # The eager first round has the same shapes: masks are always there, so its last
                # bits differ from those of mapped steps.
                steps = schedule("fixed")
                if name in self.reached:
                    runner = start_compiled(step, start, inputs, steps, self.reached[name], traces)
                    if runner is not None:
                        return runner
            else:
                steps = schedule("narrow" if phase.until is None else "all")
            eager = EagerRunner(step, start, inputs, steps, TracedGradients(step, traces, steps, work.rounds or 1))
            return FirstRound(eager, self.reached, name) if compiled else eager

        return start, add_up

    def _wave(self, bound: Bound, work: Work, program: Program, post: Post, wave: list[Participant]) -> list[Reply]:
        if self.instead is not None:
            return self.instead.run_cohort(bound, work, program, post, wave)
        captured = self._captured_steps(bound.network.device)
        schedules = None if captured is None else captured.take_schedules(bound, work, post.round, program, wave)
        try:
            clients = ClientRunner(
                bound,
                work,
                post,
                wave,
                ManyClients(self.rows, 1 if captured is None else SWEEP_GRAIN),
                *self._runners(work, captured),
                schedules=schedules,
            )
            clients.run(program)
            return clients.replies()
        except torch.OutOfMemoryError as error:
            if len(wave) == 1:
                raise RunError(
                    f"round {post.round}: a single client does not fit into the device's memory ({error}); "
                    "use smaller batches or a smaller model"
                ) from error
            half = -(-len(wave) // 2)
            self.wave = half if self.wave is None else min(half, self.wave)
            self.events.append(
                f"round {post.round}: out of memory with {len(wave)} clients, waves of {self.wave} from now on"
            )
            changes: dict[str, Any] = {"halved": self.wave}
        except FedloomError:
            raise
        except Exception as error:
            if self.otherwise is None:
                raise
            half = len(wave)
            self.instead, why = self.otherwise(error)
            changes = {"engine": "loop", "wave": 0, "why": why}
        # After the handler: its exception holds the tensors that did not fit.
        if self.told is not None:
            self.told(changes)
        self._clear()
        halves = (wave[:half], wave[half:])
        return [reply for half in halves if half for reply in self._wave(bound, work, program, post, half)]

    def _clear(self) -> None:
        """Drop what waves keep on the device for the next ones."""
        self.rows.clear()
        if self.captured is not None:
            self.captured.clear()
        gc.collect()  # graphs and what they were made by refer to each other
        devices.free_cached_memory()
