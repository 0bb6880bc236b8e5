"""Rows of a wave of clients on the device, and which of them make up each step.

All rows of a wave lie in one tensor with a row of zeros behind them; a batch of the whole wave is one indexing
operation, and padding points at the zeros. Indices and masks of a phase are laid out on the host before its first step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedloom import batches
from fedloom.batches import SWEEP_BATCH
from fedloom.bound import Bound, BoundPhase
from fedloom.client import sweep_size
from fedloom.data import Rows
from fedloom.engines.vectorised.plans import Plans
from fedloom.engines.vectorised.shelves import Shelves
from fedloom.engines.vectorised.stacks import Stacks
from fedloom.slots import Sweep
from fedloom.transfer import onto
from fedloom.types import Batch, Inputs
from fedloom.work import Participant, Work

KEPT_BYTES = 1 << 30
"""How many bytes of laid-out rows are kept for the next round."""
SWEEP_GRAIN = 32
"""Rows to a multiple of which padded batches of a captured sweep are widened, so that few shapes occur."""
BLOCK_BYTES = 1 << 20
"""How many bytes of batches are gathered at once: they should still be in the processor's cache when their step comes."""


@dataclass(frozen=True, slots=True)
class Pool:
    """The rows of several clients, one after another, and a row of zeros."""

    x: Inputs
    y: Tensor
    offsets: tuple[int, ...]
    zero: int
    parts: tuple[Rows, ...]

    @staticmethod
    def of(parts: Sequence[Rows]) -> Pool:
        """Lays rows out."""
        sizes = [len(p) for p in parts]
        offsets = tuple(int(o) for o in np.concatenate([[0], np.cumsum(sizes)[:-1]]))
        plain = [p.x for p in parts if isinstance(p.x, Tensor)]
        x = _joined(plain) if plain else pytree.tree_map(lambda *t: _joined(t), *[p.x for p in parts])
        return Pool(x, _joined([p.y for p in parts]), offsets, sum(sizes), tuple(parts))

    def take(self, index: Tensor, mask: Tensor | None, pair: Batch | None = None) -> Batch:
        """The rows at ``index`` (clients x width) as one batch with a client axis."""
        flat, shape = index.reshape(-1), index.shape

        def rows(t: Tensor) -> Tensor:
            return t.index_select(0, flat).view(*shape, *t.shape[1:])

        x = rows(self.x) if isinstance(self.x, Tensor) else pytree.tree_map(rows, self.x)
        return Batch(x, rows(self.y), mask, pair)

    def nbytes(self) -> int:
        """Bytes of all rows."""
        return _nbytes(self)


def _nbytes(rows: Rows | Pool) -> int:
    own = [rows.x] if isinstance(rows.x, Tensor) else pytree.tree_leaves(rows.x)
    return sum([t.nbytes for t in (*own, rows.y)])


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([*parts, parts[0].new_zeros(1, *parts[0].shape[1:])])


class Pools:
    """Pools of the last waves, so that a cohort that returns finds its rows laid out.

    Attributes:
        plans: which of the rows make up steps.
        shelves: where batches of captured steps lie.
        stacks: what clients keep, side by side.
    """

    def __init__(self) -> None:
        self.plans, self.shelves, self.stacks = Plans(), Shelves(), Stacks()
        self._kept: OrderedDict[tuple[int, ...], Pool] = OrderedDict()
        self._held = 0
        self._ahead: tuple[Hashable, tuple[Any, ...], Feed] | None = None
        self._swept: tuple[Hashable, Laid] | None = None

    def foresee(self, bound: Bound, work: Work, round: int, wave: Sequence[Participant], grain: int) -> None:
        """Lays out the first phase and the first sweep of a round to come, which was planned, for its first wave."""
        self._ahead = self._swept = None
        phases = bound.method.phases("round")
        if not phases or sum(map(_nbytes, (p.site.train for p in wave))) > KEPT_BYTES // 4:
            return
        phase = bound.phases[phases[0].name]
        name, feed = _name(bound, work, round, phase, wave), self.feed(bound, work, round, phase, wave)
        # These are held, since the name tells them by their addresses; not what the clients keep.
        self._ahead = (name, (bound, work, [p.site for p in wave]), feed)
        shelf = self.shelves.known_of(feed)
        if shelf is not None and feed.ticks:
            shelf.offer(feed, 0)
        sweep = next((step for step in bound.method.schedule.round if isinstance(step, Sweep)), None)
        if sweep is not None:
            size, dtype = sweep_size(work, sweep, wave[0].site.train), bound.structure.dtype
            pool = self.of([p.site.train for p in wave])
            laid = lay_out(pool, dtype, size, grain, narrow=True)
            shelf = self.shelves.known_of(laid)
            if shelf is not None and laid.ticks:
                shelf.offer(laid, 0)
            self._swept = ((id(pool), dtype, size, grain), laid)

    def sweep(
        self, parts: Sequence[Rows], dtype: torch.dtype, size: int | str, grain: int, *, narrow: bool = False
    ) -> Laid:
        """All rows of every client in order, laid out unless they were foreseen."""
        pool, ahead = self.of(parts), self._swept
        if narrow and ahead is not None and ahead[0] == (id(pool), dtype, size, grain):
            self._swept = None
            return ahead[1]
        return lay_out(pool, dtype, size, grain, narrow=narrow)

    def feed(
        self,
        bound: Bound,
        work: Work,
        round: int,
        phase: BoundPhase,
        wave: Sequence[Participant],
        *,
        fixed: bool = False,
        unpadded: bool = False,
    ) -> Feed:
        """The steps of a phase for a wave, made unless they were foreseen; options as for :class:`Feed`."""
        if self._ahead is not None and not fixed and not unpadded:
            name, _, feed = self._ahead
            if name == _name(bound, work, round, phase, wave):
                self._ahead = None
                return feed
        return Feed(
            self.of([p.site.train for p in wave]),
            [self.plans.of(bound, work, round, phase, p) for p in wave],
            phase.phase.sampler.group,
            bound.structure.dtype,
            whole=phase.phase.until is not None,
            fixed=fixed,
            unpadded=unpadded,
        )

    def of(self, parts: Sequence[Rows]) -> Pool:
        """The pool of these rows."""
        key = tuple(map(id, parts))
        pool = self._kept.get(key)
        if pool is not None:
            self._kept.move_to_end(key)
            return pool
        pool = self._kept[key] = Pool.of(parts)
        self._held += pool.nbytes()
        while len(self._kept) > 1 and self._held > KEPT_BYTES:
            self._held -= self._kept.popitem(last=False)[1].nbytes()
        return pool

    def clear(self) -> None:
        """Forgets all pools."""
        self._ahead = self._swept = None
        self.stacks.clear()
        self._kept.clear()
        self._held = 0


def _name(bound: Bound, work: Work, round: int, phase: BoundPhase, wave: Sequence[Participant]) -> Hashable:
    return id(bound), id(work), round, phase.phase.name, tuple((id(p.site), p.share) for p in wave)


@dataclass(frozen=True, slots=True)
class Tick:
    """One step of a phase.

    Args:
        step: the number of the step.
        clients: the first so many clients of the wave take part.
        widths: rows of each client's batch, one number for each batch of the step.
        masked: whether some of these rows are padding.
        active: which of the clients move; None for all of them.
    """

    step: int
    clients: int
    widths: tuple[int, ...]
    masked: bool
    active: Tensor | None


def widened(clients: int) -> int:
    """The number of clients that is really stepped: at most an eighth more, so that few shapes occur.

    Example:
        >>> [widened(k) for k in (1, 7, 16, 17, 33, 100)]
        [1, 7, 16, 18, 36, 104]
    """
    if clients <= 16:
        return clients
    grain = 1 << ((clients - 1).bit_length() - 4)
    return -(-clients // grain) * grain


class Laid:
    """Which rows make up some steps of a wave: axes of indices and masks are steps, batches of a step, clients and rows.

    Attributes:
        mark: tells these steps from others for as long as it is held.
        live: who moves in each step (steps x clients), where in some step somebody does not.
    """

    def __init__(self, pool: Pool, dtype: torch.dtype, kind: str) -> None:
        self.pool, self.dtype, self.kind, self.mark = pool, dtype, kind, object()
        self.index: Tensor
        self.ticks: list[Tick]
        self.masks: Tensor | None = None
        self.live: Tensor | None = None

    def shape(self) -> Hashable:
        """The shape and types of a full step: what is laid out alike has the same."""
        x, y = self.pool.x, self.pool.y
        flat, spec = ([x], None) if isinstance(x, Tensor) else pytree.tree_flatten(x)
        rows = tuple([(t.shape[1:], t.dtype) for t in (*flat, y)])
        return self.kind, self.index.shape[1:], self.index.device, self.dtype, spec, rows

    def batch(self, tick: Tick) -> Batch:
        """The batch of a step."""
        made, t = None, tick.step
        for group in reversed(range(self.index.shape[1])):
            width = tick.widths[group]
            mask = self.masks[t, group, : tick.clients, :width] if tick.masked and self.masks is not None else None
            made = self.pool.take(self.index[t, group, : tick.clients, :width], mask, made)
        assert made is not None
        return made


class Feed(Laid):
    """The steps of a phase for a wave of clients.

    Args:
        pool: their rows.
        plans: per client the row indices of its steps.
        groups: batches per step.
        dtype: floating type of masks.
        fixed: one shape for every step: all clients, full width, mask and ``active`` always there.
        whole: all clients in every step, though shapes may change.
        unpadded: no client that moves has padding rows: one tick for each length of batch that occurs in a step.
    """

    def __init__(
        self,
        pool: Pool,
        plans: Sequence[batches.Steps],
        groups: int,
        dtype: torch.dtype,
        *,
        fixed: bool = False,
        whole: bool = False,
        unpadded: bool = False,
    ) -> None:
        super().__init__(pool, dtype, "steps")
        device = pool.y.device
        self.made = [len(p) for p in plans]
        self.planned = onto(torch.tensor(self.made, dtype=dtype), device)
        clients, steps = len(plans), max(self.made, default=0)
        rows = [rows for plan in plans for step in plan for rows in step]
        made = np.zeros((clients, steps, groups), np.int64)
        made[np.arange(steps) < np.array(self.made)[:, None]] = np.reshape([len(r) for r in rows], (-1, groups))
        full = int(made.max(initial=1))
        index = np.full((clients, steps, groups, full), pool.zero, np.int64)
        if rows:
            shifts = np.repeat(pool.offsets, made.sum((1, 2)))
            index[np.arange(full) < made[..., None]] = np.concatenate(rows) + shifts
        lengths = np.ascontiguousarray(made.transpose(1, 2, 0))
        self.index = onto(torch.from_numpy(np.ascontiguousarray(index.transpose(1, 2, 0, 3))), device)
        self.ticks = list(
            self._even_ticks(lengths, device) if unpadded else self._ticks(lengths, full, device, fixed, whole)
        )
        if any(t.masked for t in self.ticks):
            inside = onto(torch.from_numpy(lengths), device)[..., None] > torch.arange(full, device=device)
            self.masks = inside.to(dtype)

    def _ticks(self, lengths: np.ndarray, full: int, device: torch.device, fixed: bool, whole: bool) -> Iterator[Tick]:
        groups, everyone = lengths.shape[1:]
        live = lengths[:, 0] > 0
        last = (live * np.arange(1, everyone + 1)).max(1, initial=0).tolist()
        counts = [everyone if fixed or whole else min(widened(n), everyone) for n in last]
        beyond = np.arange(everyone) >= np.array(counts, np.int64)[:, None]
        idle: list[int] = (~live & ~beyond).sum(1).tolist()
        some = fixed or any(idle)
        self.live = onto(torch.from_numpy(live), device) if some else None
        actives = [None] * len(live) if self.live is None else self.live.unbind(0)
        if fixed:
            yield from (Tick(t, everyone, (full,) * groups, True, now) for t, now in enumerate(actives))
            return
        high = lengths.max((1, 2), initial=0)
        even = ((lengths == high[:, None, None]) | beyond[:, None]).all((1, 2))
        facts = zip(counts, high.tolist(), even.tolist(), idle, actives, strict=True)
        for t, (clients, width, same, waits, now) in enumerate(facts):
            active = now[:clients] if waits and now is not None else None
            yield Tick(t, clients, (width if same else full,) * groups, not same, active)

    def _even_ticks(self, lengths: np.ndarray, device: torch.device) -> Iterator[Tick]:
        for t in range(len(lengths)):
            shapes = [tuple(lengths[t, :, i]) for i in range(lengths.shape[2])]
            for shape in sorted({s for s in shapes if s[0]}, reverse=True):
                here = np.array([s == shape for s in shapes])
                active = None if here.all() else onto(torch.from_numpy(here), device)
                yield Tick(t, len(shapes), tuple(int(w) for w in shape), False, active)

    def blocks(self) -> Iterator[tuple[list[Tick], Batch]]:
        """Several steps of one shape at a time, and their batches along a first axis of steps."""
        steps, groups = self.index.shape[:2]
        row = sum(t[:1].numel() * t.element_size() for t in [*pytree.tree_leaves(self.pool.x), self.pool.y])
        size = max(1, BLOCK_BYTES // max(1, row * self.index[:1].numel()))
        for first in range(0, steps, size):
            made = None
            for group in reversed(range(groups)):
                mask = None if self.masks is None else self.masks[first : first + size, group]
                made = self.pool.take(self.index[first : first + size, group], mask, made)
            assert made is not None
            yield self.ticks[first : first + size], made


def sweep_shapes(
    bounds: Sequence[Sequence[tuple[int, int]]], size: int | str = SWEEP_BATCH, grain: int = 1, *, narrow: bool = False
) -> list[tuple[int, int, bool]]:
    """Clients of each batch of a sweep, the first ones, the rows of each, and whether some of them are padding.

    Args:
        bounds: per client the bounds of its batches.
        size: rows of a full batch.
        grain: rows to a multiple of which a padded batch is widened, up to a full one.
        narrow: clients at the end whose rows are over are left out, half of those that are there at a time, so that few shapes
            occur; the first batch has all.

    Example:
        >>> sweep_shapes([[(0, 128), (128, 170)], [(0, 128), (128, 160)]], grain=32)
        [(2, 128, False), (2, 64, True)]
        >>> sweep_shapes([[(0, 128), (128, 170)], [(0, 90)]], narrow=True)
        [(2, 128, True), (1, 42, False)]
    """
    most = SWEEP_BATCH if size == "full" else min(int(size), SWEEP_BATCH)
    found = []
    for step in range(max(len(b) for b in bounds)):
        lengths = [b[step][1] - b[step][0] if step < len(b) else 0 for b in bounds]
        while narrow and step and len(lengths) > 1 and not any(lengths[(half := -(-len(lengths) // 2)) :]):
            lengths = lengths[:half]
        width, padded = max(lengths), min(lengths) < max(lengths)
        found.append((len(lengths), max(width, min(-(-width // grain) * grain, most)) if padded else width, padded))
    return found


def lay_out(pool: Pool, dtype: torch.dtype, size: int | str, grain: int, *, narrow: bool = False) -> Laid:
    """The batches of a sweep, as :func:`sweep_shapes` has them."""
    bounds = [batches.in_order(len(p), size) for p in pool.parts]
    shapes = sweep_shapes(bounds, size, grain, narrow=narrow)
    full = max((width for _, width, _ in shapes), default=0)
    ends = np.zeros((len(shapes), len(bounds), 2), np.int64)
    for i, own in enumerate(bounds):
        ends[: len(own), i] = np.reshape(own, (-1, 2))
    rows = ends[..., :1] + np.arange(full)
    inside = rows < ends[..., 1:]
    index = np.where(inside, rows + np.array(pool.offsets)[:, None], pool.zero)
    # The whole sweep goes to the device at once: a copy for every batch takes longer than its rows.
    laid = Laid(pool, dtype, "sweep")
    laid.index = onto(torch.from_numpy(index), pool.y.device)[:, None]
    if any(padded for _, _, padded in shapes):
        laid.masks = onto(torch.from_numpy(inside), pool.y.device).to(dtype)[:, None]
    laid.ticks = [Tick(t, clients, (width,), padded, None) for t, (clients, width, padded) in enumerate(shapes)]
    return laid
