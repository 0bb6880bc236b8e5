"""The vectorised engine: waves of clients, each wave one vectorised program."""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from fedloom.bound import Bound
from fedloom.client import Desk
from fedloom.engines.base import Engine
from fedloom.engines.vectorised import waves
from fedloom.engines.vectorised.feed import SWEEP_GRAIN, Pools
from fedloom.engines.vectorised.graphed import Arenas
from fedloom.engines.vectorised.layout import Stacked
from fedloom.engines.vectorised.sweeping import Grounds
from fedloom.engines.vectorised.traced import TRACE_STEPS, Traces
from fedloom.errors import FedloomError, RunError, UserError
from fedloom.particulars import Particulars
from fedloom.slots import Program
from fedloom.work import Participant, Post, Reply, Work

StepKind = Literal["auto", "mapped", "traced", "compiled", "graphed"]


class VectorisedEngine:
    """Runs clients side by side.

    Args:
        step: how steps are made: ``"mapped"`` (vmap and autograd), ``"traced"`` (the same operations without Python between
            them), ``"compiled"`` (fused by ``torch.compile``), ``"graphed"`` (replays of CUDA graphs), or ``"auto"``: graphed on
            CUDA, elsewhere traced where the run is long enough to pay.
        wave: most clients side by side; None for the rule of :mod:`fedloom.engines.vectorised.waves`.
        unpadded: batches of unequal length are made one length at a time, for models in which rows see each other.
        otherwise: called with the error when clients cannot be run side by side after all; returns the engine that takes over, and why.

    Attributes:
        events: each time that memory ran out, in words.
        told: called with what changes in the plan (smaller waves, another engine), before the clients are tried again.
        instead: the engine that has taken over.
    """

    name = "vectorised"

    def __init__(
        self,
        *,
        step: StepKind = "auto",
        wave: int | None = None,
        unpadded: bool = False,
        otherwise: Callable[[Exception], tuple[Engine, str]] | None = None,
    ) -> None:
        if step not in ("auto", "mapped", "traced", "compiled", "graphed"):
            raise UserError(f"step={step!r}: expected auto, mapped, traced, compiled or graphed")
        self.step, self.wave, self.unpadded = step, wave, unpadded
        self.pools = Pools()
        self.traces = None if step == "mapped" else Traces(TRACE_STEPS if step == "auto" else 1, step == "compiled")
        self.arenas, self.grounds = Arenas(), Grounds()
        self._ahead: Particulars | None = None
        self._sizes: dict[Hashable, tuple[Bound, Work, int]] = {}
        self.events: list[str] = []
        self.told: Callable[[dict[str, Any]], None] | None = None
        self.otherwise = otherwise
        self.instead: Engine | None = None

    def run_cohort(
        self, bound: Bound, work: Work, program: Program, post: Post, participants: Sequence[Participant]
    ) -> list[Reply]:
        """One reply per participant, in the order given."""
        if self.instead is not None:
            return self.instead.run_cohort(bound, work, program, post, participants)
        found: dict[str, Reply] = {}
        for wave in self._waves(bound, work, participants, next(iter(post.leaves.values())).device):
            found |= {r.id: r for r in self._wave(bound, work, program, post, wave)}
        return [found[p.site.id] for p in participants]

    def foresee(
        self, bound: Bound, work: Work, round: int, people: Callable[[], Sequence[Participant]], post: Post
    ) -> None:
        """Plans a round to come, where the device is still at work on the present one: on a CPU nothing is gained.

        The post need not be the one that will be sent; the more alike they are, the more there is to gain.
        """
        there = next(iter(bound.start.values()))
        if self.instead is not None or not self._captures(there):
            return
        asked = people()
        self.pools.plans.foresee(bound, work, round, asked)
        if not asked or self.unpadded:
            return
        wave = self._waves(bound, work, asked, there.device)[0]
        try:
            self.pools.foresee(bound, work, round, wave, SWEEP_GRAIN)
            self.pools.stacks.foresee(bound, wave, post)
            self._ahead = Particulars(work, round, wave, Stacked(self.pools), there.device, bound.structure.dtype)
        except torch.OutOfMemoryError:  # there will be room when this round's replies are gone
            self.pools.clear()

    def _waves(
        self, bound: Bound, work: Work, people: Sequence[Participant], device: torch.device
    ) -> list[list[Participant]]:
        return waves.cut(waves.side_by_side(bound, people), self.wave or self._most(bound, work, people, device.type))

    def _most(self, bound: Bound, work: Work, people: Sequence[Participant], device: str) -> int:
        rows = max([len(p.site.train) for p in people])
        key = (id(bound), id(work), rows, device)
        if key not in self._sizes:
            self._sizes = {key: (bound, work, waves.wave_size(bound, work, rows, device))}
        return self._sizes[key][2]

    def facts(self) -> dict[str, Any]:
        """What was resolved, and what happened since: for the run's record."""
        notes = [*([] if self.traces is None else self.traces.notes), *self.arenas.notes]
        name = self.name if self.instead is None else self.instead.name
        return {"engine": name, "step": self.step, "wave": self.wave or 0, "events": [*self.events, *notes]}

    def _captures(self, there: Tensor) -> bool:
        return self.step == "graphed" or (self.step == "auto" and there.is_cuda)

    def _wave(self, bound: Bound, work: Work, program: Program, post: Post, wave: list[Participant]) -> list[Reply]:
        if self.instead is not None:
            return self.instead.run_cohort(bound, work, program, post, wave)
        try:
            captured = self._captures(next(iter(post.leaves.values())))
            arenas, grounds = (self.arenas, self.grounds) if captured else (None, None)
            layout = Stacked(self.pools, self.traces, unpadded=self.unpadded, arenas=arenas, grounds=grounds)
            desk = Desk(bound, work, post, wave, layout, self._ahead)
            desk.run(program)
            return desk.replies(read=False)
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
        # Outside of the handler: its exception holds the tensors that did not fit.
        if self.told is not None:
            self.told(changes)
        self._clear()
        halves = (wave[:half], wave[half:])
        return [reply for half in halves if half for reply in self._wave(bound, work, program, post, half)]

    def _clear(self) -> None:
        """Gives up what waves leave on the device for the next ones."""
        self.pools.clear()
        self.arenas.known.clear()
        self.grounds.known.clear()
        gc.collect()  # graphs and what they were made by refer to each other
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
