"""Many clients side by side along axis 0; shorter ones are padded and masked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fedloom.batches import Steps
from fedloom.clients.arrangement import BatchSchedule, Shapes
from fedloom.data import Rows
from fedloom.engines.vectorised import attention
from fedloom.engines.vectorised.rows import RowCache, sweep_schedule, training_schedule
from fedloom.network import Network
from fedloom.types import Leaves


def over_clients(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn`` for tensors with a leading client axis: the one place where ``vmap`` is called."""
    mapped = torch.vmap(fn, randomness="different")

    def call(*args: Any) -> Any:
        with attention.whole():
            return mapped(*args)

    return call


class ManyClients:
    """Every tensor has a leading client axis.

    Args:
        cache: joined rows of earlier waves.
        grain: rows to a multiple of which padded batches of sweeps are widened.
    """

    several = True

    def __init__(self, cache: RowCache, grain: int = 1) -> None:
        self.cache, self.grain = cache, grain

    def stack(self, values: Sequence[Tensor], *, copy: bool = False) -> Tensor:
        """Stacks the clients' values; one value that all share is expanded, not copied, unless each is to have its own."""
        first = values[0]
        if any(v is not first for v in values):
            return torch.stack(list(values))
        expanded = first.expand(len(values), *first.shape)
        return expanded.clone(memory_format=torch.contiguous_format) if copy else expanded

    def unstack(self, value: Tensor) -> Sequence[Tensor]:
        """The clients' values, as views."""
        return value.unbind(0)

    def map(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Maps a function of one client's tensors over the client axis; every client draws noise of its own."""
        return over_clients(fn)

    def to_memory_format(self, network: Network, leaves: Leaves) -> Leaves:
        """Leaves as they are."""
        return dict(leaves)

    def schedule(
        self, parts: Sequence[Rows], steps: Sequence[Steps], dtype: torch.dtype, shapes: Shapes
    ) -> BatchSchedule:
        """Indices, masks and shapes of all steps, computed at once."""
        return training_schedule(self.cache.of(parts), steps, dtype, shapes)

    def sweep(self, parts: Sequence[Rows], size: int | str, dtype: torch.dtype, *, narrow: bool) -> BatchSchedule:
        """All rows in order; a client that has run out holds padding only, or is left out."""
        return sweep_schedule(self.cache.of(parts), dtype, size, self.grain, narrow=narrow)
