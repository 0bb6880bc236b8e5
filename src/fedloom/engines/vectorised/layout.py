"""The layout of many clients: every tensor has a leading client axis, shorter clients are padded and masked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedloom import batches
from fedloom.batches import SWEEP_BATCH
from fedloom.bound import Bound, BoundPhase
from fedloom.client import Adder, Desk
from fedloom.engines.loop import rows_of
from fedloom.engines.vectorised import feed
from fedloom.engines.vectorised.compiled import CompiledStepper, eligible
from fedloom.engines.vectorised.graphed import Arenas, GraphedStepper
from fedloom.engines.vectorised.mapping import over_clients
from fedloom.engines.vectorised.stacks import same
from fedloom.engines.vectorised.stepper import MappedStepper
from fedloom.engines.vectorised.sweeping import CapturedAdder, Grounds, WaveAdder
from fedloom.engines.vectorised.traced import Traces
from fedloom.slots import Judge, Sweep
from fedloom.types import Batch, Leaves


class Stacked:
    """Clients side by side along axis 0.

    Args:
        pools: rows of earlier waves that are still laid out.
        traces: traced steps, if the engine traces any.
        unpadded: whether batches of unequal length are made one length at a time.
        arenas: captured steps, if the engine captures any.
        grounds: captured sweeps, if the engine captures any.
    """

    def __init__(
        self,
        pools: feed.Pools,
        traces: Traces | None = None,
        *,
        unpadded: bool = False,
        arenas: Arenas | None = None,
        grounds: Grounds | None = None,
    ) -> None:
        self.pools, self.traces, self.unpadded, self.arenas = pools, traces, unpadded, arenas
        self.grounds = grounds
        self.grain = 1 if grounds is None or unpadded else feed.SWEEP_GRAIN

    def gather(self, values: Sequence[Tensor], *, apart: bool = False) -> Tensor:
        """Stacks the clients' values; one value that all share is expanded, not copied, unless each is to have its own."""
        if not apart and same(values):
            return values[0].expand(len(values), *values[0].shape)
        return self.pools.stacks.of(values)

    def split(self, value: Tensor) -> Sequence[Tensor]:
        """The clients' values, as views."""
        return value.unbind(0)

    def column(self, values: Tensor) -> Tensor:
        """The vector as it is."""
        return values

    def call(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Maps a function of one client's tensors over the client axis."""
        if not pytree.tree_leaves(args):
            return fn(*args)
        return over_clients(fn)(*args)

    def suited(self, bound: Bound, leaves: Leaves) -> Leaves:
        """Leaves as they are."""
        return dict(leaves)

    def stepper(self, desk: Desk, phase: BoundPhase, leaves: Leaves) -> MappedStepper:
        """Steps of the whole wave."""
        if self.arenas is not None and not self.unpadded and phase.phase.until is None:
            return GraphedStepper(desk, phase, leaves, self.pools, self.arenas)
        if self.traces is not None and self.traces.compiled and not self.unpadded and eligible(desk, phase):
            return CompiledStepper(desk, phase, leaves, self.pools, self.traces)
        return MappedStepper(desk, phase, leaves, self.pools, self.traces, unpadded=self.unpadded)

    def batches(self, desk: Desk, phase: BoundPhase) -> Iterator[tuple[Batch, Tensor | None]]:
        """Not used: the stepper lays the steps of a wave out itself."""
        raise AssertionError("a wave is fed by its stepper")

    def sweep(self, desk: Desk, rows: str, size: int | str = SWEEP_BATCH, *, narrow: bool = False) -> Iterator[Batch]:
        """All rows in order; a client that has run out holds padding only, or is left out."""
        laid = self.laid(desk, rows, size, narrow=narrow)
        return (laid.batch(tick) for tick in laid.ticks)

    def laid(self, desk: Desk, rows: str, size: int | str = SWEEP_BATCH, *, narrow: bool = False) -> feed.Laid:
        """The same, as it is laid out."""
        parts = [rows_of(p, rows) for p in desk.participants]
        return self.pools.sweep(parts, desk.bound.structure.dtype, size, self.grain, narrow=narrow)

    def adder(self, desk: Desk, step: Sweep | Judge, fn: Callable[..., Leaves]) -> Adder:
        """Batches of the whole wave."""
        if self.arenas is not None and self.grounds is not None:
            return CapturedAdder(desk, step, fn, self)
        return WaveAdder(desk, step, fn)

    def trim(self, desk: Desk, rows: str, kept: Tensor) -> Sequence[Tensor]:
        """Per client the values of its real rows."""
        parts = [rows_of(p, rows) for p in desk.participants]
        bounds = [batches.in_order(len(p)) for p in parts]
        widths = [width for _, width, _ in feed.sweep_shapes(bounds, grain=self.grain)]
        offsets = np.concatenate([[0], np.cumsum(widths)])
        found = []
        for i, own in enumerate(bounds):
            pieces = [kept[i, offsets[s] : offsets[s] + high - low] for s, (low, high) in enumerate(own)]
            found.append(torch.cat(pieces))
        return found
