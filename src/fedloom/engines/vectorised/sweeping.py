"""Captured sweeps: on CUDA the statistic of one batch of a sweep becomes a graph that is replayed batch after batch.

What a sweep reads besides its batches (leaves, what clients have, what everybody received) lies at fixed addresses, into
which it is copied once a sweep; its batches lie on a shelf, as those of steps do. A graph adds what it computes to sums at fixed addresses. A shape is captured when the
second sweep of a round's program comes upon it, or the third judgement: the one evaluation at the end of a run is not
worth a graph. On a CPU the same code runs uncaptured.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from functools import reduce
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


_LEAVES, _, _COMMON = range(3)  # what a sweep reads, in order
Types = tuple[torch.dtype, ...]
Path = tuple[Hashable, ...]


def distinct(
    values: Any, own: Callable[[Path], bool] = lambda path: False
) -> tuple[Hashable, list[tuple[int, tuple[int, ...]]], list[Tensor]]:
    """How tensors lie, where each is found among those that differ and along which axes it is repeated, and these.

    What all clients share is one tensor. What they own is not, though they have the same as long as they are new.

    Example:
        >>> one = torch.zeros(3)
        >>> values = {"received": one, "leaves": one.expand(5, 3), "memory": one.expand(5, 3), "n": torch.ones(5)}
        >>> _, places, tensors = distinct(values, lambda path: path == ("memory",))
        >>> places, [tuple(t.shape) for t in tensors]
        ([(0, ()), (0, (0,)), (1, ()), (2, ())], [(3,), (5, 3), (5,)])
    """
    known: dict[Hashable, int] = {}
    met: dict[tuple[int, bool], tuple[Hashable, tuple[int, tuple[int, ...]]]] = {}
    facts: list[Hashable] = []
    places: list[tuple[int, tuple[int, ...]]] = []
    tensors: list[Tensor] = []
    for path, value in tree.spread(values).items():
        owned = own(path)
        name = (id(value), owned)
        found = met.get(name)
        if found is None:  # leaves are often the very tensors from which clients started
            shape = value.shape
            dims: tuple[int, ...] = ()
            if owned:
                place, lies = len(tensors), None
                tensors.append(value)
            else:
                steps = value.stride()
                if 0 in steps:
                    dims = tuple([d for d, step in enumerate(steps) if not step and shape[d] > 1])
                    for dim in reversed(dims):
                        value = value.select(dim, 0)
                lies = (value.shape, value.stride()) if dims else (shape, steps)
                place = known.setdefault((value.data_ptr(), lies, value.dtype), len(tensors))
                if place == len(tensors):
                    tensors.append(value)
            found = met[name] = (shape, dims, lies, value.dtype, place), (place, dims)
        places.append(found[1])
        facts.append((path, found[0]))
    return tuple(facts), places, tensors


class Ground:
    """Tensors at fixed addresses for one sweep of one wave.

    Args:
        values: leaves, what clients have, and what everybody received, with the shapes to be.
        sums: what the sweep adds up, with the shapes and types to be.
        bound: kept, since graphs read its tensors and since it is told from others by its address.
        own: which of the values clients own.
    """

    def __init__(self, values: tuple[Any, ...], sums: Leaves, bound: Bound, own: Callable[[Path], bool]) -> None:
        _, places, tensors = distinct(values, own)
        self.tensors = [torch.empty_like(t) for t in tensors]
        flat, shape = pytree.tree_flatten(values)
        here: dict[tuple[int, int], Tensor] = {}  # by place too: one that is owned and shared has two
        for value, (place, dims) in zip(flat, places, strict=True):
            static = self.tensors[place]
            for dim in dims:
                static = static.unsqueeze(dim)
            here[id(value), place] = static.expand(value.shape)
        found = [here[id(value), place] for value, (place, _) in zip(flat, places, strict=True)]
        self.leaves, self.private, self.common = pytree.tree_unflatten(found, shape)
        self.sums = {k: torch.zeros_like(v, memory_format=torch.contiguous_format) for k, v in sums.items()}
        self.graphs: OrderedDict[Hashable, tuple[Replay, Shelf, Types]] = OrderedDict()
        self.bound = bound


class Grounds:
    """The captured sweeps of a run.

    Attributes:
        known: by sweep and by how its tensors lie, the last used ones.
        times: how many sweeps came upon each shape of batch.
    """

    def __init__(self) -> None:
        self.known: OrderedDict[Hashable, Ground] = OrderedDict()
        self.times: dict[Hashable, Counter[Hashable]] = {}

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
        self.values = (self.leaves, desk.private, common_of(desk))
        self.settled: Ground | None = None
        self.inside = False
        self.met: set[Hashable] = set()
        self.types: set[Types] = set()
        if not self.off:
            facts, _, self.tensors = distinct(self.values, self._own)
            post = desk.post
            facts = (post.cohort, post.population, tuple(desk.momenta.items()), facts)
            self.key = arenas.name(self.name, facts)
            self.times = grounds.times.setdefault(self.key, Counter())

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

    def _own(self, path: Path) -> bool:
        """Whether clients own a value: a round in which all of them are new then needs no graphs of its own."""
        group = path[0]
        if group == _COMMON or isinstance(self.step, Judge):
            return False
        return (group != _LEAVES and path[1] != "start") or self.desk.bound.specs[str(path[-1])].kept

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
            ground = Ground(self.values, wide, desk.bound, self._own)
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
