"""Steps of a whole wave: the objective mapped with ``vmap``, its sum differentiated, stacked leaves moved in place.

Clients stand in order of their steps, longest first. When the last of them have run out, the wave narrows to the
clients before them: slices along axis 0 are views, so that nothing is copied and those who stopped cannot move.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedloom.bound import Bound, BoundPhase
from fedloom.client import Desk
from fedloom.engines.vectorised.feed import Pools, Tick
from fedloom.engines.vectorised.mapping import over_clients
from fedloom.engines.vectorised.traced import Attached, Traces
from fedloom.optim import OptState
from fedloom.stepping import Stepper
from fedloom.types import EACH, Batch, Leaves, Memory

Known = tuple[frozenset[str], frozenset[str], Bound]
"""The leaves that the objective of a phase reaches, those that its steps change, and whose they are: told by its address, and so held."""


class MappedStepper(Stepper):
    """The steps of a phase for a wave of clients."""

    stacked = True

    def __init__(
        self,
        desk: Desk,
        phase: BoundPhase,
        leaves: Leaves,
        pools: Pools,
        traces: Traces | None = None,
        *,
        unpadded: bool = False,
        fixed: bool = False,
    ) -> None:
        super().__init__(desk, phase, leaves)
        people = desk.participants
        self.feed = pools.feed(desk.bound, desk.work, desk.post.round, phase, people, fixed=fixed, unpadded=unpadded)
        self.unpadded = unpadded
        self.traces = traces
        self.name: Hashable = (id(desk.bound), phase.phase.name, people[0].key)
        self.planned = self.feed.planned
        self.all = (self.leaves, self.params, self.private)
        self.all_states: list[OptState] = []
        self.own = {
            *phase.trained,
            *(s.name for s in desk.bound.specs.values() if s.copy == phase.phase.copy and s.buffer),
        }
        self.clients = len(people)
        self.tick: Tick | None = None
        self._attached: dict[tuple[tuple[int, ...], bool], Attached | None] = {}
        self._shapes: Counter[Hashable] = Counter()

    def take(self) -> None:
        """As for one client."""
        super().take()
        self.all = (self.leaves, self.params, self.private)

    def batches(self) -> Iterator[tuple[Batch, Tensor | None]]:
        """One batch of every client that still has one."""
        for tick in self.feed.ticks:
            if tick.clients != self.clients:
                self.narrow(tick.clients)
            self.tick = tick
            yield self.feed.batch(tick), tick.active

    def narrow(self, clients: int) -> None:
        """Goes on with the first clients only."""
        leaves, params, private = self.all
        whole = clients == len(self.desk.participants)

        def first(value: Tensor) -> Tensor:
            return value if whole else value.detach()[:clients]

        self.params = [first(p).requires_grad_() for p in params]
        self.leaves = {k: first(v) for k, v in leaves.items()} | dict(zip(self.phase.trained, self.params, strict=True))
        self.private = pytree.tree_map(first, private)
        if self.clients > clients:
            self.carry = pytree.tree_map(lambda t: t[:clients], self.carry)
        self.states = [
            OptState({k: [first(t) for t in v] for k, v in state.slots.items()}, self.states[i].step)
            for i, state in enumerate(self.all_states)
        ]
        self.clients = clients
        self._attached.clear()

    def begin(self, used: set[str]) -> None:
        """Optimisers of the whole wave, whatever its present width."""
        now, self.params = self.params, self.all[1]
        super().begin(used)
        self.params, self.all_states = now, self.states
        if self.clients != len(self.desk.participants):
            self.narrow(self.clients)

    def known(self) -> Known:
        """What the first step has told, for steppers of later rounds."""
        used = {self.phase.trained[i] for where, _, _ in self.groups for i in where}
        return frozenset(used), frozenset(self.own), self.desk.bound

    def recall(self, known: Known | None) -> None:
        """Begins with what the first step of an earlier round has told, if there was one."""
        if known is not None:
            used, written, _ = known
            self.begin(set(used))
            for name in sorted(written):
                self._writable(name)

    def step(self, batch: Batch, active: Tensor | None) -> None:
        """As for one client; rows of a client that has stopped do not count."""
        if self.unpadded:
            self._step_of_one_length(batch, active)
            return
        if self.going is not None and active is not None:
            batch = _without(batch, active, self.desk.bound.structure.dtype)
        super().step(batch, active)

    def _step_of_one_length(self, batch: Batch, active: Tensor | None) -> None:
        """A step in which only clients with batches of one length move: several of these make one step of the wave."""
        assert self.tick is not None
        self.made, specs = self.tick.step, self.desk.bound.specs
        for state in self.states:
            state.step = self.before + self.made * self.phase.phase.repeat
        still = {} if active is None else {n: v.clone() for n, v in self.leaves.items() if specs[n].buffer}
        super().step(batch, active)
        for name, value in still.items():
            if name in self.own and active is not None:
                here = self.leaves[name]
                here.copy_(torch.where(_along(active, here), here, value))

    def move(self, grads: list[Tensor | None] | None, active: Tensor | None) -> None:
        """As for one client; where weights decay, a leaf of a static key stays still for clients with another one."""
        bound, people = self.desk.bound, self.desk.participants
        decays = any((o or self.desk.work.optimizer).weight_decay for _, o in self.phase.groups)
        keys = [bound.specs[n].key for n in self.phase.trained]
        keyed = [(p, key) for p, key in zip(self.params, keys, strict=True) if key is not None]
        if not decays or not keyed or people[0].key != EACH:
            super().move(grads, active)
            return
        before = [p.detach().clone() for p, _ in keyed]
        super().move(grads, active)
        assert bound.told is not None
        owner, name = bound.told
        own: Tensor = self.private["addressed"][owner][name]
        with torch.no_grad():
            for (here, key), then in zip(keyed, before, strict=True):
                here.copy_(torch.where(_along(own == key, here), here, then))

    def gradients(self, packed: dict[str, Any]) -> tuple[Tensor, list[Tensor | None] | None]:
        """Losses and gradients of every client: a traced graph where there is one, else ``vmap`` and autograd."""
        step = self.number()
        trace = self._trace(packed, step) if self.traces is not None else None
        if trace is not None:
            losses, grads, self.carry = trace(packed, self.carry, step)
            return losses, grads
        losses, self.carry = self.mapped(self.leaves, self.private, packed, self.carry, step)
        if not losses.requires_grad:
            return losses, None
        total, fill = losses.sum(), bool(self.groups)
        found = torch.autograd.grad(total, self.params, allow_unused=True, materialize_grads=fill)
        return losses.detach(), list(found)

    def mapped(
        self, leaves: Leaves, private: dict[str, Any], packed: dict[str, Any], carry: Memory, step: Tensor
    ) -> tuple[Tensor, Memory]:
        """The objective of every client."""
        losses, carry = over_clients(self.objective)(leaves, private, packed, carry, step)
        return losses, carry

    def note(self, losses: Tensor, active: Tensor | None) -> None:
        """Keeps account of the losses; steps are known beforehand unless ``until`` decides."""
        if self.going is not None:
            super().note(losses, active)
            return
        if active is not None:
            losses = torch.where(active, losses, torch.zeros_like(losses))
        if self.total is None:
            self.total = losses.new_zeros(len(self.desk.participants))
        self.total[: self.clients] += losses
        self.made += 1

    def count(self) -> Tensor:
        """Steps made by each client."""
        if self.going is not None:
            return super().count()
        return self.planned

    def counted(self) -> list[int] | None:
        """Steps made by each client as numbers, where they are known without asking the device."""
        return self.feed.made if self.going is None else super().counted()

    def assign(self, fn: Callable[..., Leaves], active: Tensor | None) -> None:
        """Writes a pure function of the leaves back into them; clients that have stopped stay still."""
        with torch.no_grad():
            changed = self.desk.layout.call(lambda v, p: fn(v, self.see(p)), self.leaves, self.private)
            for name, value in changed.items():
                here = self._writable(name)
                here.copy_(value if active is None else torch.where(_along(active, value), value, here))

    def _writable(self, name: str) -> Tensor:
        if name not in self.own:
            whole = self.all[0][name].clone()
            self.all[0][name] = whole
            self.leaves[name] = whole[: self.clients]
            self.own.add(name)
            self._attached.clear()
        return self.leaves[name]

    def _trace(self, packed: dict[str, Any], step: Tensor) -> Attached | None:
        assert self.tick is not None and self.traces is not None
        shape = (self.tick.widths, "mask" in packed)
        if shape not in self._attached:
            self._attached[shape] = self.traces.of(self, packed, step, self._planned_steps())
        return self._attached[shape]

    def _planned_steps(self) -> int:
        """How often a step of the present shape is made in the whole run."""
        assert self.tick is not None
        tick = self.tick
        if not self._shapes:
            self._shapes = Counter((t.clients, t.widths, t.masked) for t in self.feed.ticks)
        times = self._shapes[tick.clients, tick.widths, tick.masked]
        return times * self.phase.phase.repeat * (self.desk.work.rounds or 1)


def _along(values: Tensor, like: Tensor) -> Tensor:
    return values.reshape(-1, *[1] * (like.dim() - 1))


def _without(batch: Batch, active: Tensor, dtype: torch.dtype) -> Batch:
    rows = active.to(dtype)[:, None]
    mask = rows.expand(-1, batch.y.shape[1]) if batch.mask is None else batch.mask * rows
    pair = None if batch.pair is None else _without(batch.pair, active, dtype)
    return Batch(batch.x, batch.y, mask, pair)
