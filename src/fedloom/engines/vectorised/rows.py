"""The rows of a wave and the schedule of its steps.

One tensor contains all rows of a wave and a final row of zeros. A batch is one ``index_select``;
padding points to the zeros. The host computes the indices and masks of a phase before its first
step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedloom.clients import batches
from fedloom.clients.arrangement import Shapes, Slot
from fedloom.clients.batches import SWEEP_BATCH, Steps
from fedloom.data import Rows
from fedloom.devices import to_device_async
from fedloom.tasks.batch import Batch
from fedloom.tensors import Inputs, flatten, map_nested, structure_of, unflatten

KEPT_BYTES = 1 << 30
"""Bytes of joined rows that are cached for the next round."""
SWEEP_GRAIN = 32
"""Padded batches of captured sweeps are widened to a multiple of this: few shapes occur."""
BLOCK_BYTES = 1 << 20
"""Bytes of batches that are read at once. They should stay in the processor's cache until used."""


@dataclass(frozen=True, slots=True)
class JoinedRows:
    """The concatenated rows of several clients and a row of zeros, which has the index ``zero``."""

    x: Inputs
    y: Tensor
    offsets: tuple[int, ...]
    zero: int
    parts: tuple[Rows, ...]

    @staticmethod
    def of(parts: Sequence[Rows]) -> JoinedRows:
        """Concatenate the clients' rows."""
        sizes = [len(p) for p in parts]
        offsets = tuple(int(o) for o in np.concatenate([[0], np.cumsum(sizes)[:-1]]))
        columns = zip(*[flatten(p.x) for p in parts], strict=True)
        x = unflatten(structure_of(parts[0].x), [_joined(column) for column in columns])
        return JoinedRows(x, _joined([p.y for p in parts]), offsets, sum(sizes), tuple(parts))

    def take(self, index: Tensor, mask: Tensor | None, pair: Batch | None = None) -> Batch:
        """Return the rows at ``index``, shape ``(clients, width)``, as one batch."""
        flat, shape = index.reshape(-1), index.shape

        def rows(t: Tensor) -> Tensor:
            return t.index_select(0, flat).view(*shape, *t.shape[1:])

        return Batch(map_nested(rows, self.x), rows(self.y), mask, pair)

    def nbytes(self) -> int:
        """Return the bytes of all rows."""
        return sum([t.nbytes for t in flatten((self.x, self.y))])


def nbytes(rows: Rows) -> int:
    """Return the bytes of a client's rows."""
    return sum([t.nbytes for t in flatten((rows.x, rows.y))])


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([*parts, parts[0].new_zeros(1, *parts[0].shape[1:])])


class RowCache:
    """An LRU cache of the joined rows of waves: the same clients often return in the next round."""

    def __init__(self) -> None:
        self._entries: OrderedDict[tuple[int, ...], JoinedRows] = OrderedDict()
        self._bytes = 0

    def of(self, parts: Sequence[Rows]) -> JoinedRows:
        """Return the joined rows of these clients."""
        key = tuple(map(id, parts))  # the entry holds the parts, so that their ids stay theirs
        rows = self._entries.get(key)
        if rows is not None:
            self._entries.move_to_end(key)
            return rows
        rows = self._entries[key] = JoinedRows.of(parts)
        self._bytes += rows.nbytes()
        while len(self._entries) > 1 and self._bytes > KEPT_BYTES:
            self._bytes -= self._entries.popitem(last=False)[1].nbytes()
        return rows

    def clear(self) -> None:
        """Remove all entries."""
        self._entries.clear()
        self._bytes = 0


def widened(clients: int) -> int:
    """Return the number of clients that a step computes: at most an eighth more, few values.

    Example:
        >>> [widened(k) for k in (1, 7, 16, 17, 33, 100)]
        [1, 7, 16, 18, 36, 104]
    """
    if clients <= 16:
        return clients
    grain = 1 << ((clients - 1).bit_length() - 4)
    return -(-clients // grain) * grain


class WaveSchedule:
    """The steps of a wave.

    Args:
        rows: the rows of all clients.
        index: row numbers, shape ``(steps, batches of a step, clients, rows)``.
        masks: 1 for real rows, 0 for padding, of the same shape; None without padding.
        live: whether a step changes a client, shape ``(steps, clients)``; None if all steps change
            all of their clients.
        dtype: floating type of masks.
        slots: the steps.
        counts: number of steps of each client.
        bounds: for a sweep, the first and last rows of each client's batches.
    """

    def __init__(
        self,
        rows: JoinedRows,
        index: Tensor,
        masks: Tensor | None,
        live: Tensor | None,
        dtype: torch.dtype,
        slots: Sequence[Slot],
        counts: Sequence[int],
        bounds: Sequence[Sequence[tuple[int, int]]] = (),
    ) -> None:
        self.rows, self.index, self.masks, self.live, self.dtype = rows, index, masks, live, dtype
        self.slots, self.counts, self.bounds = slots, counts, bounds
        self.mark = object()

    def batch(self, slot: Slot) -> Batch:
        """Return the rows of a step, of the clients that take part."""
        batch, t = None, slot.step
        for group in reversed(range(self.index.shape[1])):
            width = slot.widths[group]
            mask = self.masks[t, group, : slot.clients, :width] if slot.padded and self.masks is not None else None
            batch = self.rows.take(self.index[t, group, : slot.clients, :width], mask, batch)
        assert batch is not None
        return _hidden(batch, slot.active.to(self.dtype)) if slot.hide and slot.active is not None else batch

    def blocks(self) -> Iterator[tuple[Sequence[Slot], Batch]]:
        """Yield several steps of one shape and their batches, stacked along axis 0."""
        steps, groups = self.index.shape[:2]
        row = sum(t[:1].numel() * t.element_size() for t in flatten((self.rows.x, self.rows.y)))
        size = max(1, BLOCK_BYTES // max(1, row * self.index[:1].numel()))
        for first in range(0, steps, size):
            batch = None
            for group in reversed(range(groups)):
                mask = None if self.masks is None else self.masks[first : first + size, group]
                batch = self.rows.take(self.index[first : first + size, group], mask, batch)
            assert batch is not None
            yield self.slots[first : first + size], batch

    def unpad(self, values: Tensor) -> Sequence[Tensor]:
        """Return each client's values of real rows, given the values of all batches."""
        offsets = np.concatenate([[0], np.cumsum([slot.widths[0] for slot in self.slots])])
        return [
            torch.cat([values[i, offsets[s] : offsets[s] + high - low] for s, (low, high) in enumerate(own)])
            for i, own in enumerate(self.bounds)
        ]

    def shape(self) -> Hashable:
        """Return a key of a full step's shape and types. Schedules of one key share buffers."""
        x, y = self.rows.x, self.rows.y
        kinds = tuple([(t.shape[1:], t.dtype) for t in flatten((x, y))])
        return bool(self.bounds), self.index.shape[1:], self.index.device, self.dtype, structure_of(x), kinds


def training_schedule(rows: JoinedRows, steps: Sequence[Steps], dtype: torch.dtype, shapes: Shapes) -> WaveSchedule:
    """Return the steps of a phase for a wave of clients.

    Args:
        rows: their rows.
        steps: the row indices of each client's steps. Clients are sorted, most steps first.
        dtype: floating type of masks.
        shapes: ``"narrow"`` leaves out the last clients after their steps; ``"all"`` does not, as a
            phase with ``until`` needs the losses of all clients; ``"fixed"`` gives every step one
            shape: all clients, full width, a mask and ``active``.
    """
    device, counts = rows.y.device, [len(own) for own in steps]
    clients, most = len(steps), max(counts, default=0)
    groups = next((len(step) for own in steps for step in own), 1)
    picked = [index for own in steps for step in own for index in step]
    widths = np.zeros((clients, most, groups), np.int64)
    widths[np.arange(most) < np.array(counts)[:, None]] = np.reshape([len(i) for i in picked], (-1, groups))
    full = int(widths.max(initial=1))
    index = np.full((clients, most, groups, full), rows.zero, np.int64)
    if picked:
        shifts = np.repeat(rows.offsets, widths.sum((1, 2)))
        index[np.arange(full) < widths[..., None]] = np.concatenate(picked) + shifts
    lengths = np.ascontiguousarray(widths.transpose(1, 2, 0))
    on_device = to_device_async(torch.from_numpy(np.ascontiguousarray(index.transpose(1, 2, 0, 3))), device)
    slots, live = _training_slots(lengths, full, device, shapes)
    masks = None
    if any(slot.padded for slot in slots):
        inside = to_device_async(torch.from_numpy(lengths), device)[..., None] > torch.arange(full, device=device)
        masks = inside.to(dtype)
    return WaveSchedule(rows, on_device, masks, live, dtype, slots, counts)


def _training_slots(
    lengths: np.ndarray, full: int, device: torch.device, shapes: Shapes
) -> tuple[list[Slot], Tensor | None]:
    groups, everyone = lengths.shape[1:]
    moves = lengths[:, 0] > 0
    last = (moves * np.arange(1, everyone + 1)).max(1, initial=0).tolist()
    counts = [min(widened(n), everyone) if shapes == "narrow" else everyone for n in last]
    beyond = np.arange(everyone) >= np.array(counts, np.int64)[:, None]
    idle: list[int] = (~moves & ~beyond).sum(1).tolist()
    live = to_device_async(torch.from_numpy(moves), device) if shapes == "fixed" or any(idle) else None
    actives = [None] * len(moves) if live is None else live.unbind(0)
    if shapes == "fixed":
        return [Slot(t, everyone, (full,) * groups, True, active) for t, active in enumerate(actives)], live
    high = lengths.max((1, 2), initial=0)
    even = ((lengths == high[:, None, None]) | beyond[:, None]).all((1, 2))
    facts = zip(counts, high.tolist(), even.tolist(), idle, actives, strict=True)
    slots = [
        Slot(t, n, (width if same else full,) * groups, not same, active[:n] if waits and active is not None else None)
        for t, (n, width, same, waits, active) in enumerate(facts)
    ]
    return slots, live


def sweep_shapes(
    bounds: Sequence[Sequence[tuple[int, int]]], size: int | str = SWEEP_BATCH, grain: int = 1, *, narrow: bool = False
) -> list[tuple[int, int, bool]]:
    """Return for each batch of a sweep its clients, rows per client, and whether rows are padding.

    Args:
        bounds: the first and last rows of each client's batches.
        size: rows of a full batch.
        grain: a padded batch is widened to a multiple of this, at most to a full batch.
        narrow: leave out clients at the end without further rows, half of the clients at a time, so
            that few shapes occur. The first batch has all clients.

    Example:
        >>> sweep_shapes([[(0, 128), (128, 170)], [(0, 128), (128, 160)]], grain=32)
        [(2, 128, False), (2, 64, True)]
        >>> sweep_shapes([[(0, 128), (128, 170)], [(0, 90)]], narrow=True)
        [(2, 128, True), (1, 42, False)]
    """
    most = SWEEP_BATCH if size == "full" else min(int(size), SWEEP_BATCH)
    shapes = []
    for step in range(max(len(b) for b in bounds)):
        lengths = [b[step][1] - b[step][0] if step < len(b) else 0 for b in bounds]
        while narrow and step and len(lengths) > 1 and not any(lengths[(half := -(-len(lengths) // 2)) :]):
            lengths = lengths[:half]
        width, padded = max(lengths), min(lengths) < max(lengths)
        shapes.append((len(lengths), max(width, min(-(-width // grain) * grain, most)) if padded else width, padded))
    return shapes


def sweep_schedule(rows: JoinedRows, dtype: torch.dtype, size: int | str, grain: int, *, narrow: bool) -> WaveSchedule:
    """Return the batches of a sweep, with the shapes of :func:`sweep_shapes`."""
    bounds = [batches.in_order(len(p), size) for p in rows.parts]
    shapes = sweep_shapes(bounds, size, grain, narrow=narrow)
    full = max((width for _, width, _ in shapes), default=0)
    ends = np.zeros((len(shapes), len(bounds), 2), np.int64)
    for i, own in enumerate(bounds):
        ends[: len(own), i] = np.reshape(own, (-1, 2))
    numbers = ends[..., :1] + np.arange(full)
    inside = numbers < ends[..., 1:]
    index = np.where(inside, numbers + np.array(rows.offsets)[:, None], rows.zero)
    # One copy for the whole sweep: a copy for each batch takes longer than its rows.
    on_device = to_device_async(torch.from_numpy(index), rows.y.device)[:, None]
    masks = None
    if any(padded for _, _, padded in shapes):
        masks = to_device_async(torch.from_numpy(inside), rows.y.device).to(dtype)[:, None]
    slots = [Slot(t, clients, (width,), padded) for t, (clients, width, padded) in enumerate(shapes)]
    return WaveSchedule(rows, on_device, masks, None, dtype, slots, [len(own) for own in bounds], bounds)


def _hidden(batch: Batch, active: Tensor) -> Batch:
    """Mask the rows of the clients that the step does not change."""
    counts = active[:, None]
    mask = counts.expand(-1, batch.y.shape[1]) if batch.mask is None else batch.mask * counts
    pair = None if batch.pair is None else _hidden(batch.pair, active)
    return Batch(batch.x, batch.y, mask, pair)
