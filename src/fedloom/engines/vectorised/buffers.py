"""Batches of several steps at fixed addresses: a captured step takes its own by number, and nobody hands them over one by one."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from fedloom.clients.arrangement import Slot
    from fedloom.engines.vectorised.rows import WaveSchedule

BUFFER_BYTES = 1 << 25
"""How many bytes of batches a buffer holds, if it holds more than one."""
BUFFER_STEPS = 16
"""How many steps a buffer holds at most."""
KEPT_BUFFERS = 32
"""From how many shelves the captured steps of a phase take their batches; clients that each have their own width bring ever more."""


class BatchBuffer:
    """The batches of some steps: axes are steps, batches of a step, clients and rows.

    Args:
        schedule: steps whose batches have the shape to be.

    Attributes:
        place: the place of the step that is next, on the device.
        holds: what is laid on the buffer, and from which step on.
        at: the place of the step that is next, as far as the host knows.
    """

    def __init__(self, schedule: WaveSchedule) -> None:
        rows = [*pytree.tree_leaves(schedule.rows.x), schedule.rows.y]
        cells = schedule.index[:1].numel()
        size = sum(t[:1].nbytes for t in rows) * cells
        self.room = max(1, min(BUFFER_STEPS, BUFFER_BYTES // max(1, size)))
        shape = (self.room, *schedule.index.shape[1:])

        def empty(t: Tensor) -> Tensor:
            return t.new_empty(*shape, *t.shape[1:])

        self.x, self.y = pytree.tree_map(empty, schedule.rows.x), empty(schedule.rows.y)
        self.masks: Tensor | None = None
        self.live: Tensor | None = None
        self.place = torch.zeros(1, dtype=torch.int64, device=schedule.rows.y.device)
        self.holds: tuple[object, int] | None = None
        self.at = -1

    def load(self, schedule: WaveSchedule, step: int) -> None:
        """Has the batch of a step at hand, with those of the steps after it."""
        first = step - step % self.room
        if self.holds is None or self.holds[0] is not schedule.mark or self.holds[1] != first:
            self.fill(schedule, first)
        if self.at != step - first:
            self.at = step - first
            self.place.fill_(self.at)

    @torch.no_grad()
    def fill(self, schedule: WaveSchedule, first: int) -> None:
        """Lays the batches of the steps from one on."""
        self.holds = None
        index = schedule.index[first : first + self.room]
        count, flat = len(index), index.reshape(-1)
        parts = zip(
            [*pytree.tree_leaves(self.x), self.y], [*pytree.tree_leaves(schedule.rows.x), schedule.rows.y], strict=True
        )
        for to, source in parts:
            words, here = (_words(source, 1), _words(to[:count], 4)) if source.is_contiguous() else (source, to[:count])
            torch.index_select(words, 0, flat, out=here.view(-1, *words.shape[1:]))
        if schedule.masks is not None:
            if self.masks is None:
                self.masks = schedule.masks.new_zeros(self.y.shape[:4])
            self.masks[:count].copy_(schedule.masks[first : first + count])
        if schedule.live is not None:
            if self.live is None:
                self.live = schedule.live.new_zeros(self.room, schedule.live.shape[1])
            self.live[:count].copy_(schedule.live[first : first + count])
        self.holds = (schedule.mark, first)

    def batch(self, slot: Slot) -> tuple[dict[str, Any], Tensor | None]:
        """The batch at the present place, packed, and who moves; what is captured reads it from wherever that place is then."""
        count = slot.clients

        def chosen(t: Tensor) -> Tensor:
            return t[0].contiguous() if self.room == 1 else _words(t, 4).index_select(0, self.place)[0].view(t.dtype)

        packed: dict[str, Any] | None = None
        for group in reversed(range(len(slot.widths))):
            width, below = slot.widths[group], packed

            def part(t: Tensor, group: int = group, width: int = width) -> Tensor:
                return chosen(t[:, group, :count, :width])

            packed = {"x": pytree.tree_map(part, self.x), "y": part(self.y)}
            if slot.padded and self.masks is not None:
                packed["mask"] = part(self.masks)
            if below is not None:
                packed["pair"] = below
        assert packed is not None
        active = None if slot.active is None or self.live is None else chosen(self.live[:, :count])
        return packed, active


def _words(t: Tensor, axes: int) -> Tensor:
    """The same bytes as words of eight where what is behind the first axes is made of such: a fraction of the elements to copy."""
    whole = t.dim() > axes and t.element_size() < 8 and not t.shape[-1] * t.element_size() % 8
    return t.view(torch.int64) if whole else t


class BatchBuffers:
    """The shelves of a run by the shape of what lies on them, for as long as a captured step takes its batch from there."""

    def __init__(self) -> None:
        self.known: WeakValueDictionary[Hashable, BatchBuffer] = WeakValueDictionary()

    def known_of(self, schedule: WaveSchedule) -> BatchBuffer | None:
        """The buffer for some steps, if there is one."""
        return self.known.get(schedule.shape())

    def of(self, schedule: WaveSchedule) -> BatchBuffer:
        """The buffer for some steps."""
        buffer = self.known_of(schedule)
        if buffer is None:
            buffer = self.known[schedule.shape()] = BatchBuffer(schedule)
        return buffer


def renewed(graphs: dict[Hashable, tuple[Any, BatchBuffer]], buffer: BatchBuffer) -> bool:
    """Has captured steps that read a buffer stand last; those of the buffer unused for longest go if it is one too many.

    Says whether some went.
    """
    for key in [key for key, made in graphs.items() if made[1] is buffer]:
        graphs[key] = graphs.pop(key)
    others = list(dict.fromkeys([made[1] for made in graphs.values() if made[1] is not buffer]))
    if len(others) < KEPT_BUFFERS:
        return False
    for key in [key for key, made in graphs.items() if made[1] is others[0]]:
        del graphs[key]
    return True
