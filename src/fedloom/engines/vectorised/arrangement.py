"""The arrangement of a wave: clients stacked along axis 0, short batches padded and masked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fedloom import tensors
from fedloom.clients.arrangement import BatchSchedule, Shapes
from fedloom.clients.batches import Steps
from fedloom.data import Rows
from fedloom.engines.vectorised import attention
from fedloom.engines.vectorised.rows import RowCache, sweep_schedule, training_schedule
from fedloom.network.functional import Network
from fedloom.tensors import Leaves
from fedloom.torch_internals import add_batch_axis, remove_batch_axis, vmap_level


def over_clients(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Map a function over the client axis, axis 0 of all tensors, as ``torch.vmap`` does.

    Every client draws different noise.
    """

    def call(*args: Any) -> Any:
        clients = tensors.flatten(args)[0].shape[0]
        with attention.whole(), vmap_level(clients) as level:
            results = fn(*tensors.map_nested(lambda t: add_batch_axis(t, level), args))
            return tensors.map_nested(lambda t: remove_batch_axis(t, level, clients), results)

    return call


class ManyClients:
    """The arrangement of a wave: axis 0 of every tensor is the client.

    Args:
        cache: joined rows of earlier waves.
        grain: padded batches of sweeps are widened to a multiple of this number of rows.
    """

    several = True

    def __init__(self, cache: RowCache, grain: int = 1) -> None:
        self.cache, self.grain = cache, grain

    def stack(self, values: Sequence[Tensor], *, copy: bool = False) -> Tensor:
        """Stack the values. If all are one tensor, expand it; with ``copy``, copy it."""
        first = values[0]
        if any(v is not first for v in values):
            return torch.stack(list(values))
        expanded = first.expand(len(values), *first.shape)
        return expanded.clone(memory_format=torch.contiguous_format) if copy else expanded

    def unstack(self, value: Tensor) -> Sequence[Tensor]:
        """Return the rows of a tensor, as views."""
        return value.unbind(0)

    def map(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Map a function over the client axis. Each client draws different noise."""
        return over_clients(fn)

    def to_memory_format(self, network: Network, leaves: Leaves) -> Leaves:
        """Return the leaves."""
        return dict(leaves)

    def schedule(
        self, parts: Sequence[Rows], steps: Sequence[Steps], dtype: torch.dtype, shapes: Shapes
    ) -> BatchSchedule:
        """Compute the indices, masks and shapes of all steps."""
        return training_schedule(self.cache.of(parts), steps, dtype, shapes)

    def sweep(self, parts: Sequence[Rows], size: int | str, dtype: torch.dtype, *, narrow: bool) -> BatchSchedule:
        """Return all rows in order. Clients without further rows are padded or left out."""
        return sweep_schedule(self.cache.of(parts), dtype, size, self.grain, narrow=narrow)
