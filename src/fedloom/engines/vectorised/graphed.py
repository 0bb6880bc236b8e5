"""Captured steps: on CUDA a whole step (gradient, optimiser, masks, projections) becomes one graph that is replayed.

A graph reads and writes fixed addresses. An :class:`Arena` holds the tensors of one phase and one wave at such addresses: what clients have is copied in when a phase begins
and out when it ends, and batches lie on a :class:`Shelf`, several steps of them. A wave that narrows uses the front of the same tensors, with a graph for each width that occurs.
Learning rates, step counts and the number of the step are tensors, so that a graph serves every round and a step is nothing but a replay. On a CPU there is nothing to capture and
the same code runs step by step, which is how it is tested.
"""

from __future__ import annotations

import copy
import gc
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedloom import tree
from fedloom.bound import BoundPhase
from fedloom.client import Desk
from fedloom.engines.vectorised.feed import Pools, Tick
from fedloom.engines.vectorised.shelves import Shelf, renewed
from fedloom.engines.vectorised.stepper import Known, MappedStepper
from fedloom.engines.vectorised.traced import common_of, watched
from fedloom.optim import OptState
from fedloom.stepping import objective
from fedloom.transfer import onto
from fedloom.types import Batch, Leaves, Memory

Replay = Callable[[], None]
_LATER = Batch(torch.empty(0), torch.empty(0))
KEPT_ARENAS = 8
"""How many phases and widths of waves keep their tensors and graphs."""


class Arenas:
    """The arenas of a run, the last used ones.

    Attributes:
        dropped: whether graphs were given up since garbage was collected last; they hold memory until then.
    """

    def __init__(self) -> None:
        self.known: OrderedDict[Hashable, Arena] = OrderedDict()
        self.dropped = True  # those of an earlier run may still be there
        self.used: dict[Hashable, Known] = {}
        self.refused: set[Hashable] = set()
        self.notes: list[str] = []
        self.last: tuple[Hashable, tuple[Tensor, ...]] | None = None
        self.pool: Any = None
        self.side: Any = None
        self._names: dict[Hashable, int] = {}

    def name(self, what: Hashable, facts: Hashable) -> Hashable:
        """A short name for what is told from others by many facts: a tuple of hundreds is looked at once, not at every use."""
        return what, self._names.setdefault((what, facts), len(self._names))

    def told(self, numbers: tuple[float, ...], device: torch.device) -> tuple[Tensor, ...]:
        """Numbers on a device, where those of the last phase often are already."""
        if self.last is None or self.last[0] != (numbers, device):
            together = onto(torch.tensor(numbers, dtype=torch.float64), device)
            self.last = ((numbers, device), together.unbind(0))
        return self.last[1]

    def keep(self, key: Hashable, arena: Arena) -> None:
        """Keeps an arena and drops the one unused for longest."""
        self.known[key] = arena
        self.known.move_to_end(key)
        while len(self.known) > KEPT_ARENAS:
            self.known.popitem(last=False)
            self.dropped = True

    def capture(self, body: Replay, *, cuda: bool) -> Replay:
        """A function that repeats what ``body`` does with the same tensors."""
        if not cuda:
            return body
        if self.pool is None:
            self.pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        collecting = gc.isenabled()
        if self.dropped:  # not always: it takes longer than the capture
            gc.collect()
            self.dropped = False
        gc.disable()  # an old graph that is collected while another is captured spoils it
        try:
            with torch.cuda.graph(graph, pool=self.pool):
                body()
        finally:
            if collecting:
                gc.enable()
        return graph.replay

    def record(self, body: Replay, mutable: Sequence[Tensor], touched: set[str], what: str) -> Replay | None:
        """A replay of ``body``, which is tried once as it is, undone, then captured; None and a note where it cannot be.

        Args:
            body: what is repeated.
            mutable: the tensors that it changes.
            touched: where client code notes which changing Python numbers it reads: these would be baked in.
            what: the name of it in a note.
        """
        before, cuda = tree.copies(mutable), mutable[0].is_cuda
        try:
            if cuda:
                # One stream for all trials: memory that is freed on a stream is of use to that stream alone.
                self.side = self.side or torch.cuda.Stream()
                self.side.wait_stream(torch.cuda.current_stream())
                try:
                    with torch.cuda.stream(self.side):
                        body()
                finally:  # after an error too: what was begun there still reads tensors that are freed next
                    torch.cuda.current_stream().wait_stream(self.side)
            else:
                body()
            tree.overwrite(mutable, before)
            if touched:
                raise ValueError(f"client code reads {', '.join(sorted(touched))}, which change from round to round")
            return self.capture(body, cuda=cuda)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            why = str(error).strip().splitlines()
            self.notes.append(f"{what} is mapped, not captured: {why[0] if why else repr(error)}")
            tree.overwrite(mutable, before)
            return None


class Arena:
    """Tensors at fixed addresses for the steps of one phase and one wave.

    A client's start that is everybody's lies there once, and a leaf that no step changes is its start.

    Args:
        stepper: a stepper whose values have the shapes to be.
        settled: what is copied in whenever a phase begins, in the order of :meth:`GraphedStepper.settled`.
    """

    def __init__(self, stepper: GraphedStepper, settled: tuple[Any, ...]) -> None:
        desk, phase, clients = stepper.desk, stepper.phase, len(stepper.desk.participants)

        def empty(t: Tensor) -> Tensor:
            return torch.empty(t.shape, dtype=t.dtype, device=t.device)

        twin = pytree.tree_map(empty, settled)
        rest, self.private, self.common, self.carry = twin
        self.tensors = list(tree.spread(twin).values())
        received, own = self.common["received"], self.private["start"]
        start = {
            n: own[n] if n in own else received[n].expand(clients, *received[n].shape) for n in desk.private["start"]
        }
        self.private["start"] = start
        leaves = stepper.all[0]
        self.own = [n for n in leaves if n in stepper.own]
        mine = {n: empty(leaves[n]) for n in self.own}
        self.leaves = {n: mine[n] if n in mine else rest[n] if n in rest else start[n] for n in leaves}
        self.slots = pytree.tree_map(empty, [s.slots for s in stepper.all_states])
        device = self.private["n"].device
        self.counts: list[Any] = [torch.zeros((), dtype=torch.float64, device=device) for _ in stepper.groups]
        self.rates = [torch.zeros((), dtype=torch.float64, device=device) for _ in stepper.groups]
        self.rated: tuple[float, ...] = ()
        self.total = torch.zeros(clients, dtype=stepper.params[0].dtype, device=device)
        self.made = torch.zeros((), dtype=torch.int64, device=device)
        self.opening: Replay | None = None
        self.graphs: dict[Hashable, tuple[Replay, Shelf]] = {}
        self.touched: set[str] = set()
        self.groups: list[Any] = [(w, o, rate) for (w, o, _), rate in zip(stepper.groups, self.rates, strict=True)]
        self.see = watched(desk, self.common, self.touched)
        self.objective = objective(desk, phase, self.see)

    def mutable(self) -> list[Tensor]:
        """What a step changes."""
        return [
            *(self.leaves[n] for n in self.own),
            *pytree.tree_leaves((self.slots, self.counts, self.carry)),
            self.total,
            self.made,
        ]

    def open(self) -> None:
        """A phase begins: leaves are the clients' starts, and nothing has been counted or gathered."""
        for name in self.own:
            self.leaves[name].copy_(self.private["start"][name])
        for value in (*pytree.tree_leaves((self.slots, self.counts)), self.total, self.made):
            value.zero_()


class GraphedStepper(MappedStepper):
    """The steps of a phase for a wave of clients, each the replay of a captured graph."""

    late = True

    def __init__(self, desk: Desk, phase: BoundPhase, leaves: Leaves, pools: Pools, arenas: Arenas) -> None:
        super().__init__(desk, phase, leaves, pools, None)
        self.arenas, self.pools, self.failed, self.begun = arenas, pools, False, False
        self.arena: Arena | None = None
        self.shelf: Shelf | None = None
        self.static: Tensor | None = None
        self.recall(arenas.used.get(self.name))

    def batches(self) -> Iterator[tuple[Batch, Tensor | None]]:
        """Who takes part in each step; a captured step finds its batch itself."""
        for tick in self.feed.ticks:
            if tick.clients != self.clients:
                self.narrow(tick.clients)
            self.tick = tick
            yield _LATER, tick.active

    def settled(self) -> tuple[Any, ...]:
        """What is copied in when a phase begins: leaves that are nobody's start, what clients have, what everybody received, carried values."""
        leaves, _, private = self.all
        start, received, specs = private["start"], self.desk.post.leaves, self.desk.bound.specs
        rest = {n: v for n, v in leaves.items() if n not in self.own and v is not start.get(n)}
        # What clients keep is their own though all of them are new: a round of such clients needs no arena of its own.
        mine = {n: v for n, v in start.items() if specs[n].kept or not _common(v, received.get(n))}
        return rest, {**private, "start": mine}, common_of(self.desk), self.carry

    def narrow(self, clients: int) -> None:
        """Only steps that are not captured narrow their tensors; a graph of its own serves each width."""
        if self.arena is None and not self.late:
            super().narrow(clients)
        else:
            self.clients = clients

    def number(self) -> Tensor:
        """The number of the step, at a fixed address while a step is captured."""
        return super().number() if self.static is None else self.static

    def step(self, batch: Batch, active: Tensor | None) -> None:
        """One replay; the first step of a run is mapped, which tells what the objective reaches."""
        if not self.groups or self.failed or (self.arena is None and not self._settle()):
            self._mapped(active)
            return
        assert self.arena is not None and self.tick is not None
        if not self.begun:
            self._begin(self.arena)
        tick, shelf = self.tick, self._shelf()
        shelf.offer(self.feed, tick.step)
        shape = (id(shelf), tick.clients, tick.widths, tick.masked, active is None)
        made = self.arena.graphs.get(shape)
        if made is None:
            if (replay := self._capture(self.arena, tick, shelf)) is None:
                self._leave(False)
                super().narrow(tick.clients)
                self._mapped(active)
                return
            made = self.arena.graphs[shape] = replay, shelf
        made[0]()
        shelf.at += 1
        self.made += 1

    def _mapped(self, active: Tensor | None) -> None:
        """A step that is not captured."""
        assert self.tick is not None
        if self.late:
            self.take()
            self.clients = len(self.desk.participants)
            if self.tick.clients != self.clients:
                super().narrow(self.tick.clients)
        super().step(self.feed.batch(self.tick), active)
        if self.groups:
            self.arenas.used[self.name] = self.known()

    def finish(self) -> None:
        """Copies what was trained out of the arena."""
        if self.arena is not None:
            self._leave(True)

    def _shelf(self) -> Shelf:
        """Where the batches of this phase lie."""
        if self.shelf is None:
            assert self.arena is not None
            self.shelf = self.pools.shelves.of(self.feed)
            self.arenas.dropped |= renewed(self.arena.graphs, self.shelf)
        return self.shelf

    def _settle(self) -> bool:
        """Finds or makes the arena of this phase and wave, and copies the present values in."""
        settled, post = self.settled(), self.desk.post
        values = tree.spread(settled)
        shapes = tuple([(t.shape, t.dtype) for t in values.values()])
        optimizers = tuple([(tuple(where), optimizer) for where, optimizer, _ in self.groups])
        clients = len(self.desk.participants)
        facts = (post.cohort, post.population, clients, tuple(values), shapes, optimizers)
        key = self.arenas.name(self.name, facts)
        if key in self.arenas.refused:
            self.failed = True
            return False
        arena = self.arenas.known.get(key) or Arena(self, settled)
        self.arenas.keep(key, arena)
        tree.overwrite(arena.tensors, values.values())
        self.arena, self.key = arena, key
        return True

    def _begin(self, arena: Arena) -> None:
        """Has what steps change, and their rates, as a phase begins or goes on."""
        self.begun = True
        leaves, _, private = self.all
        device, rates = arena.total.device, tuple([float(lr) for _, _, lr in self.groups])
        if arena.rated != rates:
            tree.overwrite(arena.rates, self.arenas.told(rates, device))
            arena.rated = rates
        if self.late and not self.before and all(leaves[n] is private["start"].get(n) for n in arena.own):
            if arena.opening is None:
                what = f"phase {self.phase.phase.name!r} (its beginning)"
                arena.opening = self.arenas.record(arena.open, arena.mutable(), set(), what) or arena.open
            arena.opening()
            return
        slots = [t for s in self.all_states for v in s.slots.values() for t in v]
        counts = self.arenas.told(tuple([float(s.step) for s in self.states]), device)
        tree.overwrite(
            [*(arena.leaves[n] for n in arena.own), *pytree.tree_leaves(arena.slots), *arena.counts],
            [*(leaves[n] for n in arena.own), *slots, *counts],
        )
        arena.total.zero_() if self.total is None else arena.total.copy_(self.total)
        arena.made.fill_(self.made)

    def _leave(self, over: bool) -> None:
        """Copies the arena's values back, and goes on without it, unless the phase is over."""
        arena = self.arena
        assert arena is not None
        leaves, _, private = self.all
        own = [n for n in arena.own if n in leaves]
        *found, self.total = tree.copies([*(arena.leaves[n] for n in own), arena.total])
        leaves |= dict(zip(own, found, strict=True))
        for state in self.all_states:
            state.step = self.before + self.made * self.phase.phase.repeat
        if not over or self.desk.work.keep_optimizer:
            slots = [t for s in self.all_states for v in s.slots.values() for t in v]
            tree.overwrite(slots, pytree.tree_leaves(arena.slots))
        params = [leaves[n] for n in self.phase.trained]
        if not over:
            self.carry = pytree.tree_map(lambda t: t.clone(), arena.carry)
            params = [p.requires_grad_() for p in params]
        self.params, self.leaves, self.private = params, leaves, private
        self.all = (leaves, params, private)
        self.states, self.clients = self.all_states, len(self.desk.participants)
        self.arena, self.late = None, False

    def _capture(self, arena: Arena, tick: Tick, shelf: Shelf) -> Replay | None:
        """A graph of one step at a width."""
        body, what = self._body(arena, tick, shelf), f"phase {self.phase.phase.name!r}"
        replay = self.arenas.record(body, [*arena.mutable(), shelf.place], arena.touched, what)
        if replay is None:
            self.arenas.refused.add(self.key)
            self.failed = True
        else:  # a model that changes its input in place has done so when it was tried
            shelf.lay(self.feed, tick.step - shelf.at)
        return replay

    def _body(self, arena: Arena, tick: Tick, shelf: Shelf) -> Replay:
        """One step on the front of an arena, in place."""
        count = tick.clients

        def front(value: Tensor) -> Tensor:
            return value[:count]

        def body() -> None:
            twin, (packed, active) = copy.copy(self), shelf.batch(tick)
            noise: Tensor = front(arena.private["noise"])
            twin.arena, twin.clients, twin.tick = None, count, tick
            twin.static = torch.zeros_like(noise) + arena.made if self.drawn else noise
            twin.objective, twin.groups, twin.total = arena.objective, arena.groups, arena.total
            twin.see = arena.see
            twin.params = [front(arena.leaves[n]).detach().requires_grad_() for n in self.phase.trained]
            twin.leaves = {n: front(v) for n, v in arena.leaves.items()}
            twin.leaves |= dict(zip(self.phase.trained, twin.params, strict=True))
            twin.private = pytree.tree_map(front, arena.private)
            twin.states = [
                OptState({k: [front(t) for t in v] for k, v in slots.items()}, steps)
                for slots, steps in zip(arena.slots, arena.counts, strict=True)
            ]
            twin.carry = pytree.tree_map(front, arena.carry)
            twin.own, twin.all = set(self.own), ({**self.all[0]}, *self.all[1:])
            MappedStepper.step(twin, Batch.unpacked(packed), active)
            if twin.own != self.own:
                raise ValueError("a projection changes a leaf that it did not change in the first step")
            for kept, state in zip(arena.counts, twin.states, strict=True):
                kept.copy_(state.step)
            carried: Memory = twin.carry
            tree.overwrite([front(t) for t in pytree.tree_leaves(arena.carry)], pytree.tree_leaves(carried))
            shelf.place.add_(1)
            if self.drawn:
                arena.made.add_(1)

        return body


def _common(start: Tensor, received: Tensor | None) -> bool:
    """Whether clients' starts are all the same tensor, the one that everybody received."""
    if received is None or start.data_ptr() != received.data_ptr() or start.shape[1:] != received.shape:
        return False
    return (len(start) == 1 or not start.stride(0)) and start.stride()[1:] == received.stride()
