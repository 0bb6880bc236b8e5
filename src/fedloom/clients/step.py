"""One training step, written once: gradient of the objective, one step of each optimiser, projections, what follows.

A :class:`Step` says what happens with one batch. A :class:`StepState` is what that changes, all of it in place. A runner
executes steps. The same code serves one client and a wave: only ``step.arrangement`` knows which.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedloom import rng, tree
from fedloom.bound import Bound, BoundPhase
from fedloom.clients.arrangement import Arrangement, Schedule, Shapes, Slot
from fedloom.clients.inputs import ClientInputs
from fedloom.data.augment import Augmentation, key_of
from fedloom.errors import UserError
from fedloom.optim import Optimizer, OptState
from fedloom.types import Batch, Leaves, Memory, Seen
from fedloom.view import View

Gradients = Callable[..., tuple[Tensor, list[Tensor | None] | None, Memory]]
"""``(leaves, inputs, batch, carry, number) -> (losses, gradients, carry)``: :meth:`Step.gradients`, or a trace of it."""


@dataclass(frozen=True, slots=True)
class Step:
    """What happens with one batch of a phase.

    Args:
        bound: the method with its network and task.
        phase: the trained leaves, the terms of the objective, repeats, projections.
        arrangement: one client, or many.
        groups: leaves, the optimiser that moves them, and its learning rate in this round.
        augment: what changes a training batch before the forward pass.
        trained: the trained leaves by their names within the copy.
    """

    bound: Bound
    phase: BoundPhase
    arrangement: Arrangement
    groups: tuple[tuple[tuple[str, ...], Optimizer, float], ...]
    augment: Augmentation | None = None
    trained: tuple[str, ...] = ()

    def value(
        self, leaves: Leaves, seen: Seen, batch: Batch, carry: Memory, number: Tensor | int
    ) -> tuple[Tensor, Memory]:
        """The objective of one client on one batch: the sum of the phase's terms."""
        phase, bound = self.phase.phase, self.bound
        if self.augment is not None:
            batch = augmented(self.augment, batch, bound, key_of(seen.noise, number))
        if phase.view is not None:
            leaves = {**leaves, **phase.view(leaves, seen)}
        view = View(
            bound,
            leaves,
            batch,
            seen,
            copy=phase.copy,
            train=True,
            taps=self.phase.taps,
            still=self.phase.still,
            trained=self.trained,
            step=number,
        )
        total: Tensor | None = None
        carry = dict(carry)
        for term in self.phase.terms:
            if term.carry is None:
                value = term.fn(view, batch, seen)
            else:
                value, moved = term.fn(view, batch, seen, carry[term.owner])
                carry[term.owner] = {k: v.detach() for k, v in moved.items()}
            total = value if total is None else total + value
        assert total is not None, f"phase {phase.name!r} has no term"
        return total, carry

    def gradients(
        self, leaves: Leaves, inputs: ClientInputs, batch: Batch, carry: Memory, number: Tensor
    ) -> tuple[Tensor, list[Tensor | None] | None, Memory]:
        """Each client's objective and its gradient: None for a leaf that it does not reach, None if it reaches no leaf."""

        def value(leaves: Leaves, own: Any, packed: Any, carry: Memory, number: Tensor) -> tuple[Tensor, Memory]:
            return self.value(leaves, inputs.seen(own), Batch.unpacked(packed), carry, number)

        params = [leaves[n].detach().requires_grad_() for n in self.phase.trained]
        leaves = leaves | dict(zip(self.phase.trained, params, strict=True))
        losses, carry = self.arrangement.map(value)(leaves, inputs.own, batch.packed(), carry, number)
        if not losses.requires_grad:
            return losses, None, carry
        # Clients do not see each other's leaves, so the gradient of the sum is that of each.
        grads = torch.autograd.grad(losses.sum(), params, allow_unused=True)
        return losses.detach(), list(grads), carry

    def take(
        self,
        state: StepState,
        inputs: ClientInputs,
        batch: Batch,
        active: Tensor | None = None,
        gradients: Gradients | None = None,
    ) -> Tensor:
        """THE step: all that happens with one batch. Returns the clients' losses.

        Args:
            state: what the step changes.
            inputs: what client code reads.
            batch: the rows.
            active: which clients of a wave move; None for all.
            gradients: another form of :meth:`gradients`, such as a trace of it.
        """
        phase, number = self.phase.phase, self.noise_number(inputs, state.number)
        for _ in range(phase.repeat):
            losses, grads, carry = (gradients or self.gradients)(state.leaves, inputs, batch, state.carry, number)
            if carry:
                tree.overwrite(*_pairs(state.carry, carry))
            if grads is not None:
                self.optimize(state, inputs, grads, active)
            if phase.project is not None:
                self.write(phase.project, state, inputs, active)
        if phase.after is not None:
            self.write(phase.after, state, inputs, active)
        state.total += losses if active is None else torch.where(active, losses, torch.zeros_like(losses))
        state.number += 1
        return losses

    def optimize(
        self, state: StepState, inputs: ClientInputs, grads: Sequence[Tensor | None], active: Tensor | None
    ) -> None:
        """One step of each optimiser. A leaf that the objective never reached stays, as in ``torch.optim``."""
        gradient = dict(zip(self.phase.trained, grads, strict=True))
        if state.groups is None:
            state.start_optimizers(self, {n for n, g in gradient.items() if g is not None})
        others = self.leaves_of_other_keys(inputs)
        before = {n: state.leaves[n].clone() for n in others}
        for group in state.groups or ():
            params = [state.leaves[n] for n in group.names]
            gradients = [
                torch.zeros_like(p) if (g := gradient[n]) is None else g
                for n, p in zip(group.names, params, strict=True)
            ]
            group.optimizer.step_(params, gradients, group.state, group.rate, active, batched=self.arrangement.several)
        for name, trains in others.items():
            mine = state.leaves[name]
            mine.copy_(torch.where(_along(trains, mine), mine, before[name]))

    def write(
        self, fn: Callable[[Leaves, Seen], Leaves], state: StepState, inputs: ClientInputs, active: Tensor | None
    ) -> None:
        """Writes a pure function of the leaves back into them, for the clients that move."""
        with torch.no_grad():
            changed = self.arrangement.map(lambda leaves, own: fn(leaves, inputs.seen(own)))(state.leaves, inputs.own)
            for name, value in changed.items():
                mine = state.writable(name)
                mine.copy_(value if active is None else torch.where(_along(active, value), value, mine))

    def noise_number(self, inputs: ClientInputs, number: int | Tensor) -> Tensor:
        """The number of the step as a tensor, where noise is drawn from it; else any tensor of that shape."""
        noise: Tensor = inputs.own["noise"]
        if not self.bound.network.noisy and self.augment is None:
            return noise
        return torch.zeros_like(noise) + number

    def leaves_of_other_keys(self, inputs: ClientInputs) -> Leaves:
        """Return a mask over the clients of a wave for each leaf that one key trains.

        The gradient of such a leaf is zero at the other clients, but weight decay would move it there.
        """
        keys: Tensor | None = inputs.own.get("key")
        if keys is None or not any(optimizer.weight_decay for _, optimizer, _ in self.groups):
            return {}
        specs = self.bound.specs
        return {n: keys == key for n in self.phase.trained if (key := specs[n].key) is not None}


@dataclass(slots=True)
class OptimizerGroup:
    """The leaves that one optimiser moves, its rate and its moments. The rate is a tensor in a step that is captured."""

    names: tuple[str, ...]
    optimizer: Optimizer
    rate: float | Tensor
    state: OptState


@dataclass(slots=True)
class StepState:
    """What the steps of a phase change, in place. In a wave axis 0 of every tensor is the client.

    Args:
        leaves: all leaves; only those that are ``written`` are in memory that steps may change.
        written: names of those.
        carry: what terms carry from step to step, by owner.
        total: the sum of the losses.
        number: steps made; a tensor in a step that is captured.
        groups: the optimisers; None until the first gradient has shown which leaves the objective reaches.
        moments: of an earlier round, where a run keeps them: by group.
        clients: how many there are.
        whole: the state of the whole wave, of whose tensors this one's are views; None if it is that state.
    """

    leaves: Leaves
    written: set[str]
    carry: Memory
    total: Tensor
    number: int | Tensor = 0
    groups: list[OptimizerGroup] | None = None
    moments: list[OptState] | None = None
    clients: int = 1
    whole: StepState | None = None

    def start_optimizers(self, step: Step, reached: set[str]) -> None:
        """Makes the optimisers of the leaves that the objective reaches."""
        self.groups = []
        for i, (names, optimizer, rate) in enumerate(step.groups):
            own = tuple(n for n in names if n in reached)
            fresh = optimizer.init([self.leaves[n] for n in own]) if self.moments is None else self.moments[i]
            self.groups.append(OptimizerGroup(own, optimizer, rate, fresh))

    def writable(self, name: str) -> Tensor:
        """A leaf in memory that steps may change; it is copied when it is first written."""
        if name not in self.written:
            whole = self.whole or self
            mine = whole.leaves[name].clone()
            # A new dictionary: what was prepared for the old one is recognised as out of date.
            whole.leaves = {**whole.leaves, name: mine}
            if self.whole is not None:
                self.leaves = {**self.leaves, name: mine[: self.clients]}
            self.written.add(name)
        return self.leaves[name]

    def front(self, clients: int) -> StepState:
        """The state of the first clients, which is part of this one: what changes there changes here."""

        def first(value: Tensor) -> Tensor:
            return value[:clients]

        groups = self.groups and [
            replace(g, state=OptState(pytree.tree_map(first, g.state.slots), g.state.step)) for g in self.groups
        ]
        return replace(
            self,
            leaves={n: first(v) for n, v in self.leaves.items()},
            carry=pytree.tree_map(first, self.carry),
            total=first(self.total),
            groups=groups,
            clients=clients,
            whole=self.whole or self,
        )


@dataclass(frozen=True, slots=True)
class PhaseStart:
    """Where the clients stand when a phase begins: runners copy from it what steps change."""

    leaves: Leaves
    carry: Memory
    total: Tensor
    moments: list[OptState] | None
    clients: int

    def state(self, step: Step) -> StepState:
        """A state of its own: trained leaves, and the buffers of the phase's copy of the model, are copied."""
        leaves, trained = dict(self.leaves), step.phase.trained
        buffers = [s.name for s in step.bound.specs.values() if s.copy == step.phase.phase.copy and s.buffer]
        leaves |= {n: leaves[n].clone() for n in buffers}
        leaves |= dict(zip(trained, tree.copies([leaves[n] for n in trained]), strict=True))
        carry = {owner: dict(values) for owner, values in self.carry.items()}
        # Copied: what is kept must not move while the model is adapted for evaluation, or if the reply is rejected.
        moments = copy.deepcopy(self.moments)
        return StepState(leaves, {*trained, *buffers}, carry, self.total, moments=moments, clients=self.clients)


class StepRunner(Protocol):
    """Executes the steps of one phase."""

    @property
    def schedule(self) -> Schedule:
        """Where its batches come from."""

    def run(self, slot: Slot) -> Tensor | None:
        """Makes one step; returns the clients' losses where it has them at hand."""

    def finish(self) -> StepState:
        """The state of all clients after the last step."""


class EagerRunner:
    """Makes each step as it is: one client's, or a wave's with ``vmap``. The definition of right for the other runners."""

    def __init__(
        self,
        step: Step,
        start: PhaseStart,
        inputs: ClientInputs,
        schedule: Schedule,
        gradients: Gradients | None = None,
    ) -> None:
        self.step, self.inputs, self.schedule, self.gradients = step, inputs, schedule, gradients
        self.state = self.whole = start.state(step)

    def run(self, slot: Slot) -> Tensor:
        """One step; a wave goes on with its first clients where the others have no rows left."""
        if slot.clients < self.state.clients:
            self.state, self.inputs = self.state.front(slot.clients), self.inputs.front(slot.clients)
        return self.step.take(self.state, self.inputs, self.schedule.batch(slot), slot.active, self.gradients)

    def finish(self) -> StepState:
        """The state of the whole wave, of which narrower ones were views."""
        return self.whole


ScheduleOf = Callable[[Shapes], Schedule]
StartSteps = Callable[[Step, PhaseStart, ClientInputs, ScheduleOf], StepRunner]
"""Chooses a runner for a phase, and says what shapes its steps may have."""


def start_eager(step: Step, start: PhaseStart, inputs: ClientInputs, schedule: ScheduleOf) -> StepRunner:
    """The plain runner. A phase that stops by itself keeps all clients in every step."""
    return EagerRunner(step, start, inputs, schedule("narrow" if step.phase.phase.until is None else "all"))


def augmented(augment: Augmentation, batch: Batch, bound: Bound, key: Tensor) -> Batch:
    """A training batch as the run's augmentation changes it: inputs are scaled first, as the network would."""
    x = bound.network.prepared(batch.x)
    if not isinstance(x, Tensor):
        raise UserError("augment: the model has several inputs; expected one tensor of pictures")
    with torch.no_grad():
        x, y = augment(x, batch.y, key)
    pair = None if batch.pair is None else augmented(augment, batch.pair, bound, rng.fold(key, 1))
    return Batch(x, y, batch.mask, pair)


def _pairs(to: Memory, source: Memory) -> tuple[list[Tensor], list[Tensor]]:
    names = [(owner, k) for owner, values in to.items() for k in values]
    return [to[owner][k] for owner, k in names], [source[owner][k] for owner, k in names]


def _along(values: Tensor, like: Tensor) -> Tensor:
    """One value per client, shaped so that it multiplies a stacked tensor."""
    return values.reshape(-1, *[1] * (like.dim() - 1))
