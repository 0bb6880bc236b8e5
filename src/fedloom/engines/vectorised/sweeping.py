"""Captured sweeps: on CUDA the statistic of one batch of a sweep becomes a graph that is replayed batch after batch.

What a sweep reads besides its batches (leaves, what clients have, what everybody received) lies at fixed addresses, into
which it is copied once a sweep; its batches lie on a shelf, as those of steps do. A graph adds what it computes to sums at fixed addresses. A shape is captured when the
second sweep of a round's program comes upon it, or the third judgement: the one evaluation at the end of a run is not
worth a graph. On a CPU the same code runs uncaptured.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import reduce
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedloom import tree
from fedloom.bound import Bound
from fedloom.client import Adder, Desk, See
from fedloom.engines.vectorised.feed import Laid, Tick
from fedloom.engines.vectorised.graphed import Replay
from fedloom.engines.vectorised.shelves import Shelf
from fedloom.engines.vectorised.traced import common_of, watched
from fedloom.slots import Judge, Sweep
from fedloom.types import Leaves

if TYPE_CHECKING:
    from fedloom.engines.vectorised.layout import Stacked

WORTH_OF_SWEEPS, WORTH_OF_JUDGEMENTS = 2, 3
"""The one of a run, counted by shape, that is captured."""
KEPT_GRAPHS = 32
"""How many graphs of sweeps are kept, the last used ones."""


_COMMON, _LEAVES, _PRIVATE = range(3)  # what a sweep reads, in order
Types = tuple[torch.dtype, ...]
Path = tuple[Hashable, ...]
Dims = tuple[int, ...]
Place = tuple[int, Dims]
_shape, _kind = attrgetter("shape"), attrgetter("dtype")


def distinct(values: Sequence[Tensor], owned: Sequence[bool]) -> tuple[list[Place], list[Place]]:
    """Where each tensor is found among those that differ, and where these are among all; both with the axes along which they are repeated.

    What all clients share is one tensor. What they own is not, though they have the same as long as they are new.

    Example:
        >>> received, leaves, memory = (one := torch.zeros(3)), one.expand(5, 3), one.expand(5, 3)
        >>> distinct([received, leaves, memory, torch.ones(5)], [False, False, True, True])
        ([(0, ()), (0, (0,)), (1, ()), (2, ())], [(0, ()), (2, ()), (3, ())])
    """
    known: dict[Hashable, int] = {}
    places: list[Place] = []
    found: list[Place] = []
    for i, (value, own) in enumerate(zip(values, owned, strict=True)):
        dims: Dims = ()
        name: Hashable = id(value)
        if not own:
            steps = value.stride()
            dims = tuple([d for d, step in enumerate(steps) if not step and value.shape[d] > 1])
            once = once_of(value, dims)
            name = (value.data_ptr(), value.dtype, once.shape, once.stride())
        place = known.setdefault((own, name), len(found))
        if place == len(found):
            found.append((i, dims))
        places.append((place, dims))
    return places, found


def once_of(value: Tensor, dims: Dims) -> Tensor:
    """A tensor without axes along which it is repeated."""
    for dim in reversed(dims):
        value = value.select(dim, 0)
    return value


def lying(values: Sequence[Tensor], owned: Sequence[bool]) -> Hashable:
    """How tensors lie: a name that tells apart what :func:`distinct` does, in a fraction of its time."""
    shared = [value for value, own in zip(values, owned, strict=True) if not own]
    mine = [value for value, own in zip(values, owned, strict=True) if own]
    strides, same = tuple(map(Tensor.stride, shared)), _firsts(map(Tensor.data_ptr, shared))
    return tuple(map(_shape, values)), tuple(map(_kind, values)), strides, same, _firsts(map(id, mine))


def _firsts(numbers: Iterable[int]) -> tuple[int, ...]:
    """Of each number the place at which it was met first.

    Example:
        >>> _firsts([7, 5, 7])
        (0, 1, 0)
    """
    met: dict[int, int] = {}
    return tuple([met.setdefault(number, i) for i, number in enumerate(numbers)])


class Ground:
    """Tensors at fixed addresses for one sweep of one wave.

    Args:
        values: what everybody received, leaves, and what clients have, with the shapes to be.
        sums: what the sweep adds up, with the shapes and types to be.
        bound: kept, since graphs read its tensors and since it is told from others by its address.
        owned: of each tensor among the values whether clients own it.
    """

    def __init__(self, values: tuple[Any, ...], sums: Leaves, bound: Bound, owned: Sequence[bool]) -> None:
        flat, shape = pytree.tree_flatten(values)
        places, found = distinct(flat, owned)
        self.tensors = [torch.empty_like(once_of(flat[i], dims)) for i, dims in found]
        here: dict[tuple[int, int], Tensor] = {}  # by place too: one that is owned and shared has two
        for value, (place, dims) in zip(flat, places, strict=True):
            static = self.tensors[place]
            for dim in dims:
                static = static.unsqueeze(dim)
            here[id(value), place] = static.expand(value.shape)
        twins = [here[id(value), place] for value, (place, _) in zip(flat, places, strict=True)]
        self.common, self.leaves, self.private = pytree.tree_unflatten(twins, shape)
        self.sums = {k: torch.zeros_like(v, memory_format=torch.contiguous_format) for k, v in sums.items()}
        self.graphs: OrderedDict[Hashable, tuple[Replay, Shelf, Types]] = OrderedDict()
        self.bound = bound


class Grounds:
    """The captured sweeps of a run.

    Attributes:
        known: by sweep and by how its tensors lie, the last used ones.
        times: how many sweeps came upon each shape of batch.
        found: by sweep and by how its tensors lie, which of them differ.
        forms: by sweep and by the paths of its tensors a number for these, and which of them clients own.
    """

    def __init__(self) -> None:
        self.known: OrderedDict[Hashable, Ground] = OrderedDict()
        self.times: defaultdict[Hashable, Counter[Hashable]] = defaultdict(Counter)
        self.found: dict[Hashable, list[Place]] = {}
        self.forms: dict[Hashable, tuple[int, list[bool], Bound]] = {}

    def form(self, bound: Bound, step: Sweep | Judge, paths: tuple[Path, ...]) -> tuple[int, list[bool]]:
        """A number for the paths of the tensors that a sweep reads, and which of them clients own."""
        name = (id(bound), step, paths)
        if name not in self.forms:  # the method is held, since it is told by its address
            self.forms[name] = len(self.forms), [_own(bound, step, path) for path in paths], bound
        return self.forms[name][:2]

    def differing(self, key: Hashable, values: Sequence[Tensor], owned: Sequence[bool]) -> list[Tensor]:
        """Those of the tensors of a sweep that differ."""
        if key not in self.found:
            self.found[key] = distinct(values, owned)[1]
        return [once_of(values[i], dims) if dims else values[i] for i, dims in self.found[key]]

    def keep(self, key: Hashable, ground: Ground) -> bool:
        """Keeps a ground, drops graphs unused for longest, and says whether it did."""
        dropped = self.known.get(key, ground) is not ground
        self.known[key] = ground
        self.known.move_to_end(key)
        while sum(len(g.graphs) for g in self.known.values()) > KEPT_GRAPHS:
            oldest, first = next(iter(self.known.items()))
            first.graphs.popitem(last=False)
            dropped = True
            if not first.graphs:
                del self.known[oldest]
        return dropped


def _own(bound: Bound, step: Sweep | Judge, path: Path) -> bool:
    """Whether clients own a value: a round in which all of them are new then needs no graphs of its own."""
    if path[0] == _COMMON or isinstance(step, Judge):
        return False
    return (path[0] == _PRIVATE and path[1] != "start") or bound.specs[str(path[-1])].kept


def _front(values: Any, count: int) -> Any:
    """The first so many clients' part."""
    return pytree.tree_map(lambda t: t[:count], values)


def _shared(values: Leaves, bound: Bound) -> Leaves:
    """The parameters that all clients have in common, each as one tensor.

    Layers with these are computed for the rows of all clients at once, as those of one client are. Buffers are not among them:
    a layer may change them in place, for each client in its own way.
    """
    return {n: v[0] for n, v in values.items() if len(v) > 1 and not v.stride(0) and not bound.specs[n].buffer}


class WaveAdder(Adder):
    """Adds up a statistic for a wave of clients, of which batches may hold the first ones only.

    Attributes:
        apart: whether every client needs leaves of its own, though all have the same.
    """

    apart = False

    def add(self, packed: dict[str, Any]) -> None:
        """Adds the statistic of a batch; the sums of the clients that it leaves out stay."""
        desk, count = self.desk, len(packed["y"])
        if count == len(desk.participants):
            super().add(packed)
            return
        assert self.sums is not None, "the first batch leaves nobody out"
        leaves, private = _front((self.leaves, desk.private), count)
        part = self.of(desk.see, leaves, private, packed)
        self.sums = {k: torch.cat([v[:count] + part[k], v[count:]]) for k, v in self.sums.items()}

    def of(self, see: See, leaves: Leaves, private: dict[str, Any], packed: dict[str, Any]) -> Leaves:
        """As for one client; layers that all clients have in common take all rows at once."""
        shared = {} if self.apart else _shared(leaves, self.desk.bound)
        own = {n: v for n, v in leaves.items() if n not in shared}
        call, fn = self.desk.layout.call, self.fn
        try:
            found: Leaves = call(lambda mine, *rest: fn(see, {**shared, **mine}, *rest), own, private, packed)
            return found
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # ``vmap`` lets nobody write what one client has into a tensor made of what all share
            if not shared:
                raise
        self.apart = True
        return self.of(see, leaves, private, packed)


class CapturedAdder(WaveAdder):
    """Adds up a statistic for a wave of clients, each batch the replay of a captured graph."""

    def __init__(self, desk: Desk, step: Sweep | Judge, fn: Callable[..., Leaves], layout: Stacked) -> None:
        super().__init__(desk, step, fn)
        arenas, grounds = layout.arenas, layout.grounds
        assert arenas is not None and grounds is not None
        self.layout, self.arenas, self.grounds = layout, arenas, grounds
        self.name: Hashable = (id(desk.bound), step, desk.participants[0].key)
        self.off = self.name in arenas.refused
        self.values = (common_of(desk), self.leaves, desk.private)
        self.settled: Ground | None = None
        self.inside = False
        self.met: set[Hashable] = set()
        self.types: set[Types] = set()
        if not self.off:
            spread, post = tree.spread(self.values), desk.post
            form, self.owned = grounds.form(desk.bound, step, tuple(spread))
            flat = list(spread.values())
            lies = lying(flat, self.owned)
            self.key = arenas.name(self.name, (post.cohort, post.population, tuple(desk.momenta.items()), form, lies))
            self.tensors = grounds.differing(self.key, flat, self.owned)
            self.times = grounds.times[self.key]

    def over(self, rows: str, size: int | str) -> None:
        """Batch by batch, each one replay where its shape has been captured."""
        laid = self.layout.laid(self.desk, rows, size, narrow=True)
        full, shelf = laid.shape(), self.layout.pools.shelves.known_of(laid)
        for tick in laid.ticks:
            shape = (full, tick.clients, tick.widths, tick.masked)
            ground = None if self.off else self.grounds.known.get(self.key)
            made = None if ground is None else ground.graphs.get(shape)
            if ground is None or made is None or made[1] is not shelf:
                self._leave()
                self.add(laid.batch(tick).packed())
                if not self.off and self._worth(shape):
                    shelf = self._capture(shape, laid, tick)
                continue
            self._enter(ground)
            ground.graphs.move_to_end(shape)
            replay, _, types = made
            shelf.offer(laid, tick.step)
            replay()
            shelf.at += 1
            self.types.add(types)

    def total(self) -> Leaves:
        """The sums, which are the caller's own."""
        self._leave()
        return super().total()

    def _worth(self, shape: Hashable) -> bool:
        if shape not in self.met:
            self.met.add(shape)
            self.times[shape] += 1
        return self.times[shape] >= (WORTH_OF_SWEEPS if isinstance(self.step, Sweep) else WORTH_OF_JUDGEMENTS)

    def _settle(self, ground: Ground) -> None:
        """Copies what the sweep reads to its fixed addresses, once."""
        if self.settled is not ground:
            tree.overwrite(ground.tensors, self.tensors)
            self.settled = ground

    def _enter(self, ground: Ground) -> None:
        """Goes on with the sums at fixed addresses."""
        if self.inside:
            return
        self._settle(ground)
        self.grounds.known.move_to_end(self.key)
        sums = list(ground.sums.values())
        if self.sums is None:
            torch._foreach_zero_(sums)
        else:
            tree.overwrite(sums, [self.sums[k] for k in ground.sums])
            self.types.add(tuple(self.sums[k].dtype for k in ground.sums))
        self.inside = True

    def _leave(self) -> None:
        """Goes on with sums of its own."""
        if self.inside:
            assert self.settled is not None
            made = zip(self.settled.sums, tree.copies(list(self.settled.sums.values())), strict=True)
            wide = [reduce(torch.promote_types, kinds) for kinds in zip(*self.types, strict=True)]
            self.sums = {name: value.to(kind) for (name, value), kind in zip(made, wide, strict=True)}
            self.types.clear()
            self.inside = False

    def _capture(self, shape: Hashable, laid: Laid, tick: Tick) -> Shelf | None:
        """Captures a shape for the batches to come, and says where they lie; the present one has been added."""
        desk, shelf = self.desk, self.layout.pools.shelves.of(laid)
        assert self.sums is not None
        if not self.sums:
            self.off = True
            return None
        shelf.offer(laid, tick.step)
        ground = self.grounds.known.get(self.key)
        # Some statistics have another type where nothing is masked: sums are of the widest that has occurred.
        wide = self.sums if ground is None else tree.add(tree.zeros_like(ground.sums), tree.zeros_like(self.sums))
        if ground is None or any(v.dtype != ground.sums[k].dtype for k, v in wide.items()):
            ground = Ground(self.values, wide, desk.bound, self.owned)
        self._settle(ground)
        touched: set[str] = set()
        see, sums = watched(desk, ground.common, touched), ground.sums
        leaves, private, fronts = _front((ground.leaves, ground.private, sums), tick.clients)
        types: list[torch.dtype] = []

        def body() -> None:
            part = self.of(see, leaves, private, shelf.batch(tick)[0])
            types[:] = [part[k].dtype for k in sums]
            torch._foreach_add_(list(fronts.values()), [part[k] for k in sums])
            shelf.place.add_(1)

        kind = "sweep" if isinstance(self.step, Sweep) else "judgement"
        what = f"{kind} {self.step.name!r}"
        replay = self.arenas.record(body, [*sums.values(), shelf.place], touched, what)
        if replay is None:
            self.arenas.refused.add(self.name)
            self.off = True
            return None
        ground.graphs[shape] = replay, shelf, tuple(types)
        self.arenas.dropped |= self.grounds.keep(self.key, ground)
        return shelf
