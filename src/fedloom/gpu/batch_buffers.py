"""Device buffers of batches. A captured step selects its batch by an index on the device."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from fedloom.clients.arrangement import Slot
from fedloom.engines.vectorised.rows import WaveSchedule
from fedloom.tensors import flatten, map_nested

BUFFER_BYTES = 1 << 25
"""Most bytes of batches in a buffer that holds more than one step."""
BUFFER_STEPS = 16
"""Most steps in a buffer."""
BUFFER_LIMIT = 32
"""Most buffers that the graphs of a phase or sweep read. Clients of new sizes need new ones."""


class BatchBuffer:
    """The batches of several consecutive steps, at fixed addresses.

    Args:
        schedule: steps whose batches have the shape of the buffer.

    Attributes:
        x: inputs (steps x batches of a step x clients x rows x ...), one tensor or nested.
        y: targets, with the same first axes.
        index: the step that the next replay reads, counted from the first one in the buffer; on
            the device.
        host_index: the same number on the host; -1 if it is not known.
        content: the schedule whose batches the buffer holds, and the first step; None if it holds
            none.
    """

    def __init__(self, schedule: WaveSchedule) -> None:
        rows = flatten((schedule.rows.x, schedule.rows.y))
        size = sum(t[:1].nbytes for t in rows) * schedule.index[:1].numel()
        self.steps = max(1, min(BUFFER_STEPS, BUFFER_BYTES // max(1, size)))
        shape = (self.steps, *schedule.index.shape[1:])

        def empty(rows: Tensor) -> Tensor:
            return rows.new_empty(*shape, *rows.shape[1:])

        self.x, self.y = map_nested(empty, schedule.rows.x), empty(schedule.rows.y)
        self.masks: Tensor | None = None
        self.live: Tensor | None = None
        self.index = torch.zeros(1, dtype=torch.int64, device=schedule.rows.y.device)
        self.host_index = -1
        self.content: tuple[object, int] | None = None

    def load(self, schedule: WaveSchedule, step: int) -> None:
        """Select a step. Fill the buffer if it does not hold the step's batch."""
        first = step - step % self.steps
        if self.content is None or self.content[0] is not schedule.mark or self.content[1] != first:
            self.fill(schedule, first)
        if self.host_index != step - first:
            self.host_index = step - first
            self.index.fill_(self.host_index)

    @torch.no_grad()
    def fill(self, schedule: WaveSchedule, first: int) -> None:
        """Copy the batches of consecutive steps, beginning with step ``first``."""
        self.content = None  # in case a copy fails
        index = schedule.index[first : first + self.steps]
        count, flat = len(index), index.reshape(-1)
        targets = flatten((self.x, self.y))
        sources = flatten((schedule.rows.x, schedule.rows.y))
        for target, source in zip(targets, sources, strict=True):
            target = target[:count]
            if source.is_contiguous():
                source, target = _as_words(source, 1), _as_words(target, 4)
            torch.index_select(source, 0, flat, out=target.view(-1, *source.shape[1:]))
        if schedule.masks is not None:
            if self.masks is None:
                self.masks = schedule.masks.new_zeros(self.y.shape[:4])
            self.masks[:count].copy_(schedule.masks[first : first + count])
        if schedule.live is not None:
            if self.live is None:
                self.live = schedule.live.new_zeros(self.steps, schedule.live.shape[1])
            self.live[:count].copy_(schedule.live[first : first + count])
        self.content = (schedule.mark, first)

    def batch(self, slot: Slot) -> tuple[dict[str, Any], Tensor | None]:
        """Return the packed batch of the selected step, and which clients move.

        A graph that captures this call reads the step that is selected when it is replayed.
        """
        clients = slot.clients

        def select(values: Tensor) -> Tensor:
            if self.steps == 1:
                return values[0].contiguous()
            return _as_words(values, 4).index_select(0, self.index)[0].view(values.dtype)

        packed: dict[str, Any] = {}
        for group in reversed(range(len(slot.widths))):
            width, pair = slot.widths[group], packed

            def part(values: Tensor, group: int = group, width: int = width) -> Tensor:
                return select(values[:, group, :clients, :width])

            packed = {"x": map_nested(part, self.x), "y": part(self.y)}
            if slot.padded and self.masks is not None:
                packed["mask"] = part(self.masks)
            if pair:
                packed["pair"] = pair
        if slot.active is None or self.live is None:
            return packed, None
        return packed, select(self.live[:, :clients])


def _as_words(values: Tensor, axes: int) -> Tensor:
    """View the elements behind the first axes as 8-byte words if they fit: a faster copy."""
    whole = values.dim() > axes and values.element_size() < 8
    whole = whole and values.shape[-1] * values.element_size() % 8 == 0
    return values.view(torch.int64) if whole else values


class BatchBuffers:
    """The buffers of a run by the shape of their batches. A buffer lives while a graph reads it."""

    def __init__(self) -> None:
        self._buffers: WeakValueDictionary[Hashable, BatchBuffer] = WeakValueDictionary()

    def __len__(self) -> int:
        return len(self._buffers)

    def get(self, schedule: WaveSchedule) -> BatchBuffer | None:
        """Return the buffer for the batches of a schedule, if there is one."""
        return self._buffers.get(schedule.shape())

    def get_or_create(self, schedule: WaveSchedule) -> BatchBuffer:
        """Return the buffer for the batches of a schedule."""
        buffer = self.get(schedule)
        if buffer is None:
            buffer = self._buffers[schedule.shape()] = BatchBuffer(schedule)
        return buffer


def evict_graphs(graphs: dict[Hashable, tuple[Any, BatchBuffer]], buffer: BatchBuffer) -> bool:
    """Mark a buffer as most recently used and evict the graphs of the least recently used one.

    Args:
        graphs: replays and the buffers that they read, least recently used first.
        buffer: the buffer that the next replays read.

    Returns:
        Whether any graph was evicted.
    """
    for key in [key for key, (_, read) in graphs.items() if read is buffer]:
        graphs[key] = graphs.pop(key)
    others = list(dict.fromkeys([read for _, read in graphs.values() if read is not buffer]))
    if len(others) < BUFFER_LIMIT:
        return False
    for key in [key for key, (_, read) in graphs.items() if read is others[0]]:
        del graphs[key]
    return True
