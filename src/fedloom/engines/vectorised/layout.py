"""The layout of many clients: every tensor has a leading client axis, shorter clients are padded and masked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedloom import batches
from fedloom.bound import BoundPhase
from fedloom.client import Desk
from fedloom.engines.loop import planned, rows_of
from fedloom.types import Batch, Inputs


class Stacked:
    """Clients side by side along axis 0."""

    def gather(self, values: Sequence[Tensor]) -> Tensor:
        """Stacks the clients' values; one value that all share is expanded, not copied."""
        first = values[0]
        if all(v is first for v in values):
            return first.expand(len(values), *first.shape)
        return torch.stack(list(values))

    def split(self, value: Tensor) -> Sequence[Tensor]:
        """The clients' values, as views."""
        return value.unbind(0)

    def call(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Maps a function of one client's tensors over the client axis."""
        if not pytree.tree_leaves(args):
            return fn(*args)
        return torch.vmap(fn, randomness="different")(*args)

    def batches(self, desk: Desk, phase: BoundPhase) -> Iterator[tuple[Batch, Tensor | None]]:
        """One batch of every client per step; clients that have run out are inactive and hold zeros."""
        people = desk.participants
        plans = [planned(desk, phase, p) for p in people]
        steps = max(len(p) for p in plans)
        groups = phase.phase.sampler.group
        device = desk.private["n"].device
        sources = [p.site.train for p in people]
        for step in range(steps):
            made: Batch | None = None
            live = np.array([step < len(p) for p in plans])
            for group in reversed(range(groups)):
                index = [p[step][group] if step < len(p) else np.empty(0, np.int64) for p in plans]
                made = _batch([(s.x, s.y) for s in sources], index, device, made)
            assert made is not None
            yield made, torch.from_numpy(live).to(device)

    def sweep(self, desk: Desk, rows: str) -> Iterator[Batch]:
        """All rows in order; a client that has run out holds padding only."""
        parts = [rows_of(p, rows) for p in desk.participants]
        bounds = [batches.in_order(len(p)) for p in parts]
        device = desk.private["n"].device
        for step in range(max(len(b) for b in bounds)):
            index = [np.arange(*b[step]) if step < len(b) else np.empty(0, np.int64) for b in bounds]
            yield _batch([(p.x, p.y) for p in parts], index, device, None)

    def trim(self, desk: Desk, rows: str, kept: Tensor) -> Sequence[Tensor]:
        """Per client the values of its real rows."""
        parts = [rows_of(p, rows) for p in desk.participants]
        bounds = [batches.in_order(len(p)) for p in parts]
        widths = [max(b[s][1] - b[s][0] for b in bounds if s < len(b)) for s in range(max(len(b) for b in bounds))]
        offsets = np.concatenate([[0], np.cumsum(widths)])
        found = []
        for i, own in enumerate(bounds):
            pieces = [kept[i, offsets[s] : offsets[s] + high - low] for s, (low, high) in enumerate(own)]
            found.append(torch.cat(pieces))
        return found


def _batch(
    sources: Sequence[tuple[Inputs, Tensor]], index: Sequence[np.ndarray], device: torch.device, pair: Batch | None
) -> Batch:
    width = max(1, max(len(i) for i in index))
    picks = [torch.from_numpy(i).to(device) for i in index]
    xs = [pytree.tree_map(lambda t, i=i: _padded(t, i, width), x) for (x, _), i in zip(sources, picks, strict=True)]
    y = torch.stack([_padded(y, i, width) for (_, y), i in zip(sources, picks, strict=True)])
    x = pytree.tree_map(lambda *parts: torch.stack(parts), *xs)
    mask = torch.tensor([[float(j < len(i)) for j in range(width)] for i in index], device=device)
    return Batch(x, y, mask, pair)


def _padded(source: Tensor, index: Tensor, width: int) -> Tensor:
    """Rows by index, zeros behind them (a NaN in padding would leak through a mask)."""
    rows = source.index_select(0, index)
    short = width - rows.shape[0]
    return rows if not short else torch.cat([rows, rows.new_zeros(short, *rows.shape[1:])])
