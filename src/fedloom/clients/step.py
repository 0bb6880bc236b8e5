"""The training step: from a batch to new weights.

The path of a batch: :meth:`EagerRunner.run` takes it from the schedule, :meth:`Step.take` calls
:meth:`Step.gradients` (the objective and its gradient), :meth:`Step.optimize` (new weights) and
:meth:`Step.write` (projections). A :class:`StepState` contains everything that a step changes. The
same code serves one client and a wave: only ``step.arrangement`` differs.

Steps change the state in place, without exception: the first clients of a wave are views of the
whole (:meth:`StepState.front`), and a tensor that replaces one of a front is lost to the whole.
:meth:`Step.take` and :meth:`Step.gradients` read their arguments only, so that they can be traced.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from fedloom import rng, tensors
from fedloom.clients.arrangement import Arrangement, BatchSchedule, Shapes, Slot
from fedloom.clients.inputs import ClientInputs
from fedloom.data.augment import Augmentation, key_of
from fedloom.errors import UserError
from fedloom.network.bound_method import Bound, BoundPhase
from fedloom.spec.optimizer import Optimizer, OptState, along_clients
from fedloom.spec.seen import Seen
from fedloom.spec.view import View
from fedloom.tasks.batch import Batch
from fedloom.tensors import Leaves, Memory, flatten, map_nested

Gradients = Callable[..., tuple[Tensor, list[Tensor | None] | None, Memory]]
"""``(leaves, inputs, batch, carry, number) -> (losses, gradients, carry)``: :meth:`Step.gradients`, or a trace of it."""


@dataclass(frozen=True, slots=True)
class Step:
    """The step of a phase in a round: objective, optimisers and projections.

    Args:
        bound: the method with its network and task.
        phase: the trained leaves, the terms of the objective, repeats, projections.
        arrangement: the layout: one client, or a wave.
        groups: leaves, their optimiser, its learning rate in this round: a number, or in a wave
            a tensor with one rate per client.
        augment: changes a training batch before the forward pass.
        trained: the trained leaves by their names within the copy.
    """

    bound: Bound
    phase: BoundPhase
    arrangement: Arrangement
    groups: tuple[tuple[tuple[str, ...], Optimizer, float | Tensor], ...]
    augment: Augmentation | None = None
    trained: tuple[str, ...] = ()

    def value(
        self, leaves: Leaves, seen: Seen, batch: Batch, carry: Memory, number: Tensor | int
    ) -> tuple[Tensor, Memory]:
        """Return the objective of one client, the sum of the terms, and new carried values."""
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
                before = carry[term.owner]
                value, after = term.fn(view, batch, seen, before)
                # In the order of `before`: the term may return its keys in another order, and steps
                # copy the values one by one. The copies have the type of the initial values.
                carry[term.owner] = {k: after[k].detach() for k in before}
            total = value if total is None else total + value
        assert total is not None, f"phase {phase.name!r} has no term"
        return total, carry

    def gradients(
        self, leaves: Leaves, inputs: ClientInputs, batch: Batch, carry: Memory, number: Tensor
    ) -> tuple[Tensor, list[Tensor | None] | None, Memory]:
        """Return each client's objective, its gradient and the new carried values.

        The gradient is None for a leaf that the objective does not reach. Instead of the list it is
        None if the objective reaches no leaf.
        """

        def value(leaves: Leaves, own: Any, packed: Any, carry: Memory, number: Tensor) -> tuple[Tensor, Memory]:
            return self.value(leaves, inputs.seen(own), Batch.unpacked(packed), carry, number)

        params = [leaves[n].detach().requires_grad_() for n in self.phase.trained]
        leaves = leaves | dict(zip(self.phase.trained, params, strict=True))
        losses, carry = self.arrangement.map(value)(leaves, inputs.own, batch.packed(), carry, number)
        if not losses.requires_grad:
            return losses, None, carry
        # A client's loss depends on its own leaves only: the gradient of the sum is that of each.
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
        """Make one step and return the clients' losses. This is the only step in the package.

        Args:
            state: what the step changes.
            inputs: what client code reads.
            batch: the rows.
            active: which clients of a wave the step changes; None for all.
            gradients: another form of :meth:`gradients`, such as a trace of it.
        """
        phase, number = self.phase.phase, self.noise_number(inputs, state.number)
        for _ in range(phase.repeat):
            losses, grads, carry = (gradients or self.gradients)(state.leaves, inputs, batch, state.carry, number)
            # Not masked by `active`: a client that does not move reads its carried values no more.
            if carry:
                tensors.overwrite(flatten(state.carry), flatten(carry))
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
        """Make one step of each optimiser. Leaves that the objective does not reach stay."""
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
            leaf = state.leaves[name]
            leaf.copy_(torch.where(along_clients(trains, leaf), leaf, before[name]))

    def write(
        self, fn: Callable[[Leaves, Seen], Leaves], state: StepState, inputs: ClientInputs, active: Tensor | None
    ) -> None:
        """Write the values of a function of the leaves into the leaves of the active clients."""
        with torch.no_grad():
            changed = self.arrangement.map(lambda leaves, own: fn(leaves, inputs.seen(own)))(state.leaves, inputs.own)
            for name, value in changed.items():
                leaf = state.writable(name)
                leaf.copy_(value if active is None else torch.where(along_clients(active, value), value, leaf))

    def noise_number(self, inputs: ClientInputs, number: int | Tensor) -> Tensor:
        """Return the step number as a tensor if noise needs it; else any such tensor."""
        noise: Tensor = inputs.own["noise"]
        if not self.bound.network.noisy and self.augment is None:
            return noise
        return torch.zeros_like(noise) + number

    def leaves_of_other_keys(self, inputs: ClientInputs) -> Leaves:
        """Return a mask over the clients of a wave for each leaf that one static key trains.

        Its gradient is zero at the other clients, but weight decay would change it there.
        """
        keys: Tensor | None = inputs.own.get("key")
        if keys is None or not any(optimizer.weight_decay for _, optimizer, _ in self.groups):
            return {}
        specs = self.bound.specs
        return {n: keys == key for n in self.phase.trained if (key := specs[n].key) is not None}


@dataclass(slots=True)
class OptimizerGroup:
    """The leaves of one optimiser, its rate and its moments.

    The rate is a tensor if steps are captured or compiled, or if each client has its own.
    """

    names: tuple[str, ...]
    optimizer: Optimizer
    rate: float | Tensor
    state: OptState


@dataclass(slots=True)
class StepState:
    """Everything that the steps of a phase change, in place. In a wave axis 0 is the client.

    A new field must be added to :meth:`front`, and to the lists of what compiled and captured steps
    change.

    Args:
        leaves: all leaves; only those in ``written`` have memory that steps may change.
        written: names of these leaves. A front and its whole share this set.
        carry: values that terms carry from step to step, by owner.
        total: the sum of the losses.
        number: number of steps so far; a tensor if steps are captured or compiled. The number of a
            whole is out of date while a front of it makes the steps.
        groups: the optimisers; None before the first gradient, which shows the leaves that the
            objective reaches.
        moments: optimiser states of an earlier round, by group, if the run keeps them.
        clients: number of clients.
        whole: the state of the whole wave, if this one is a view of it; else None.
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
        """Create the optimisers of the leaves that the objective reaches."""
        self.groups = []
        for i, (names, optimizer, rate) in enumerate(step.groups):
            trained = tuple(n for n in names if n in reached)
            state = optimizer.init([self.leaves[n] for n in trained]) if self.moments is None else self.moments[i]
            self.groups.append(OptimizerGroup(trained, optimizer, _front(rate, self.clients), state))

    def writable(self, name: str) -> Tensor:
        """Return a leaf in memory that steps may change. Copy it at the first call."""
        if name not in self.written:
            whole = self.whole or self
            leaf = whole.leaves[name].clone()
            # A new dictionary: TracedGradients recognises by it that its arguments are out of date.
            whole.leaves = {**whole.leaves, name: leaf}
            if self.whole is not None:
                self.leaves = {**self.leaves, name: leaf[: self.clients]}
            self.written.add(name)
        return self.leaves[name]

    def front(self, clients: int) -> StepState:
        """Return the state of the first clients, as views: its steps change this state too."""

        def first(value: Tensor) -> Tensor:
            return value[:clients]

        groups = self.groups and [
            replace(g, rate=_front(g.rate, clients), state=OptState(map_nested(first, g.state.slots), g.state.step))
            for g in self.groups
        ]
        return replace(
            self,
            leaves={n: first(v) for n, v in self.leaves.items()},
            carry=map_nested(first, self.carry),
            total=first(self.total),
            groups=groups,
            clients=clients,
            whole=self.whole or self,
        )


@dataclass(frozen=True, slots=True)
class PhaseStart:
    """The values at the beginning of a phase. Runners copy those that steps change."""

    leaves: Leaves
    carry: Memory
    total: Tensor
    moments: list[OptState] | None
    clients: int

    def state(self, step: Step) -> StepState:
        """Return a state with copies of trained leaves and of buffers of the phase's copy."""
        leaves, trained = dict(self.leaves), step.phase.trained
        buffers = [s.name for s in step.bound.specs.values() if s.copy == step.phase.phase.copy and s.buffer]
        leaves |= {n: leaves[n].clone() for n in buffers}
        leaves |= dict(zip(trained, tensors.copies([leaves[n] for n in trained]), strict=True))
        carry = {owner: dict(values) for owner, values in self.carry.items()}
        # Copied: an evaluation that adapts the model, or a rejected reply, must not change them.
        moments = copy.deepcopy(self.moments)
        return StepState(leaves, {*trained, *buffers}, carry, self.total, moments=moments, clients=self.clients)


class StepRunner(Protocol):
    """Executes the steps of one phase.

    Runners do not inherit from each other. The schedule is a read-only property here, so that a
    runner may declare a narrower type.
    """

    @property
    def schedule(self) -> BatchSchedule:
        """The source of its batches."""

    def run(self, slot: Slot) -> Tensor | None:
        """Make one step. Return the clients' losses, or None if they are not at hand."""

    def finish(self) -> StepState:
        """Return the state of all clients after the last step."""


class EagerRunner:
    """Calls :meth:`Step.take` for each step. The reference for the other runners."""

    def __init__(
        self,
        step: Step,
        start: PhaseStart,
        inputs: ClientInputs,
        schedule: BatchSchedule,
        gradients: Gradients | None = None,
    ) -> None:
        self.step, self.inputs, self.schedule, self.gradients = step, inputs, schedule, gradients
        self.state = self.whole = start.state(step)

    def run(self, slot: Slot) -> Tensor:
        """Make one step, in a wave with the first clients only if the others have no rows left."""
        if slot.clients < self.state.clients:
            self.state, self.inputs = self.state.front(slot.clients), self.inputs.front(slot.clients)
        return self.step.take(self.state, self.inputs, self.schedule.batch(slot), slot.active, self.gradients)

    def finish(self) -> StepState:
        """Return the state of the whole wave. States of its first clients were views of it."""
        return self.whole


ScheduleOf = Callable[[Shapes], BatchSchedule]
StartSteps = Callable[[Step, PhaseStart, ClientInputs, ScheduleOf], StepRunner]
"""Returns a runner for a phase; asks for a schedule of certain shapes."""


def start_eager(step: Step, start: PhaseStart, inputs: ClientInputs, schedule: ScheduleOf) -> StepRunner:
    """Return the eager runner. A phase with ``until`` keeps all clients in every step."""
    return EagerRunner(step, start, inputs, schedule("narrow" if step.phase.phase.until is None else "all"))


def augmented(augment: Augmentation, batch: Batch, bound: Bound, key: Tensor) -> Batch:
    """Augment a training batch. The inputs are scaled first, as the network would scale them."""
    x = bound.network.prepared(batch.x)
    if not isinstance(x, Tensor):
        raise UserError("augment: the model has several inputs; expected one tensor of pictures")
    with torch.no_grad():
        x, y = augment(x, batch.y, key)
    pair = None if batch.pair is None else augmented(augment, batch.pair, bound, rng.fold(key, 1))
    return Batch(x, y, batch.mask, pair)


def _front(rate: float | Tensor, clients: int) -> float | Tensor:
    """Return the rates of the first clients, if each client has its own."""
    return rate[:clients] if isinstance(rate, Tensor) and rate.dim() else rate
