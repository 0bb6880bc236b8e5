"""Captured steps: on CUDA a whole step (gradient, optimiser, masks, projections) becomes one graph that is replayed.

A graph reads and writes fixed addresses. An :class:`Arena` holds the tensors of one phase and one wave at such addresses: what
clients have is copied in when a phase begins and out when it ends. A wave that narrows uses the front of the same tensors,
with a graph for each width that occurs. Learning rates, step counts, masks and the number of the step are tensors, so
that a graph serves every round. On a CPU there is nothing to capture and the same code runs step by step, which is how it
is tested.
"""

from __future__ import annotations

import copy
import gc
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedloom import tree
from fedloom.bound import BoundPhase
from fedloom.client import Desk
from fedloom.engines.vectorised.feed import Pools, Tick
from fedloom.engines.vectorised.stepper import Known, MappedStepper
from fedloom.engines.vectorised.traced import common_of, watched
from fedloom.optim import OptState
from fedloom.stepping import objective
from fedloom.transfer import onto
from fedloom.types import Batch, Leaves, Memory

Replay = Callable[[], None]
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
        before = tree.copies(mutable)
        cuda = mutable[0].is_cuda
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

    Args:
        stepper: a stepper whose values have the shapes to be.
    """

    def __init__(self, stepper: GraphedStepper) -> None:
        desk, phase = stepper.desk, stepper.phase
        twin = pytree.tree_map(lambda t: torch.empty(t.shape, dtype=t.dtype, device=t.device), stepper.values())
        self.leaves, self.private, self.common, self.slots, self.counts, self.carry, self.total, self.rates = twin
        self.tensors = list(tree.spread(twin).values())
        self.own = [n for n in self.leaves if n in stepper.own]
        self.graphs: dict[Hashable, tuple[Replay, dict[str, Any]]] = {}
        self.touched: set[str] = set()
        self.groups = [(w, o, rate) for (w, o, _), rate in zip(stepper.groups, self.rates, strict=True)]
        self.see = watched(desk, self.common, self.touched)
        self.objective = objective(desk, phase, self.see)

    def mutable(self) -> list[Tensor]:
        """What a step changes."""
        return [
            *(self.leaves[n] for n in self.own),
            *pytree.tree_leaves((self.slots, self.counts, self.carry)),
            self.total,
        ]


class GraphedStepper(MappedStepper):
    """The steps of a phase for a wave of clients, each the replay of a captured graph."""

    def __init__(self, desk: Desk, phase: BoundPhase, leaves: Leaves, pools: Pools, arenas: Arenas) -> None:
        super().__init__(desk, phase, leaves, pools, None)
        self.arenas, self.failed = arenas, False
        self.arena: Arena | None = None
        self.static: Tensor | None = None
        self.recall(arenas.used.get(self.name))

    def values(self) -> tuple[Any, ...]:
        """All tensors that a step reads or writes besides its batch, in the order of an arena."""
        leaves, _, private = self.all
        n: Tensor = private["n"]
        clients = len(self.desk.participants)
        dtype = self.params[0].dtype
        total = self.total if self.total is not None else torch.zeros(clients, dtype=dtype, device=n.device)
        told = self.arenas.told((*(float(s.step) for s in self.states), *(lr for _, _, lr in self.groups)), n.device)
        counts, rates = list(told[: len(self.states)]), list(told[len(self.states) :])
        slots = [s.slots for s in self.all_states]
        return leaves, private, common_of(self.desk), slots, counts, self.carry, total, rates

    def narrow(self, clients: int) -> None:
        """Only steps that are not captured narrow their tensors; a graph of its own serves each width."""
        if self.arena is None:
            super().narrow(clients)
        else:
            self.clients = clients

    def number(self) -> Tensor:
        """The number of the step, at a fixed address while a step is captured."""
        return super().number() if self.static is None else self.static

    def step(self, batch: Batch, active: Tensor | None) -> None:
        """One replay; the first step of a run is mapped, which tells what the objective reaches."""
        if not self.groups or self.failed:
            super().step(batch, active)
            if self.groups:
                self.arenas.used[self.name] = self.known()
            return
        if self.arena is None and not self._settle():
            super().step(batch, active)
            return
        assert self.arena is not None and self.tick is not None
        packed, tick = batch.packed(), self.tick
        shape = (tick.clients, tick.widths, "mask" in packed, active is None)
        made = self.arena.graphs.get(shape)
        if made is None:
            made = self._capture(self.arena, tick, packed, active)
            if made is None:
                self._leave()
                super().narrow(tick.clients)
                super().step(batch, active)
                return
            self.arena.graphs[shape] = made
        replay, inputs = made
        tree.overwrite(tree.spread(inputs).values(), tree.spread(self._inputs(packed, active, tick)).values())
        replay()
        self.made += 1

    def finish(self) -> None:
        """Copies what was trained out of the arena."""
        if self.arena is not None:
            self._leave()

    def _inputs(self, packed: dict[str, Any], active: Tensor | None, tick: Tick) -> dict[str, Any]:
        number = super().number()[: tick.clients]
        found = {"packed": packed, "number": number}
        return found if active is None else found | {"active": active}

    def _settle(self) -> bool:
        """Finds or makes the arena of this phase and wave, and copies the present values in."""
        values = tree.spread(self.values())
        post = self.desk.post
        shapes = tuple((t.shape, t.dtype) for t in values.values())
        optimizers = tuple((tuple(where), optimizer) for where, optimizer, _ in self.groups)
        key = (self.name, post.cohort, post.population, tuple(values), shapes, optimizers)
        if key in self.arenas.refused:
            self.failed = True
            return False
        arena = self.arenas.known.get(key) or Arena(self)
        self.arenas.keep(key, arena)
        tree.overwrite(arena.tensors, values.values())
        self.arena, self.key = arena, key
        return True

    def _leave(self) -> None:
        """Copies the arena's values back, and goes on without it."""
        arena = self.arena
        assert arena is not None
        leaves, params, _ = self.all
        own = [n for n in arena.own if n in leaves]
        tree.overwrite([leaves[n] for n in own], [arena.leaves[n] for n in own])
        slots = [t for s in self.all_states for v in s.slots.values() for t in v]
        tree.overwrite(slots, [t for s in arena.slots for v in s.values() for t in v])
        for state in self.all_states:
            state.step = self.before + self.made * self.phase.phase.repeat
        self.carry = pytree.tree_map(lambda t: t.clone(), arena.carry)
        self.total = arena.total.clone()
        self.params, self.leaves, self.private = params, leaves, self.all[2]
        self.states, self.clients = self.all_states, len(self.desk.participants)
        self.arena = None

    def _capture(
        self, arena: Arena, tick: Tick, packed: dict[str, Any], active: Tensor | None
    ) -> tuple[Replay, dict[str, Any]] | None:
        """A graph of one step at a width."""
        inputs = pytree.tree_map(lambda t: t.clone(), self._inputs(packed, active, tick))
        body, what = self._body(arena, tick, inputs), f"phase {self.phase.phase.name!r}"
        replay = self.arenas.record(body, arena.mutable(), arena.touched, what)
        if replay is None:
            self.arenas.refused.add(self.key)
            self.failed = True
            return None
        return replay, inputs

    def _body(self, arena: Arena, tick: Tick, inputs: dict[str, Any]) -> Replay:
        """One step on the front of an arena, in place."""
        count = tick.clients

        def front(value: Tensor) -> Tensor:
            return value[:count]

        def body() -> None:
            twin = copy.copy(self)
            twin.arena, twin.static, twin.clients, twin.tick = None, inputs["number"], count, tick
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
            MappedStepper.step(twin, Batch.unpacked(inputs["packed"]), inputs.get("active"))
            if twin.own != self.own:
                raise ValueError("a projection changes a leaf that it did not change in the first step")
            for kept, state in zip(arena.counts, twin.states, strict=True):
                kept.copy_(state.step)
            carried: Memory = twin.carry
            tree.overwrite([front(t) for t in pytree.tree_leaves(arena.carry)], pytree.tree_leaves(carried))

        return body
