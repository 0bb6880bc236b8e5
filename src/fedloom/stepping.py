"""The steps of a phase: gradient of the objective, one step of each group's optimiser, projections.

A :class:`Stepper` serves the layout of one client. The vectorised engine derives its own from it: the same steps for
many clients at once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedloom import rng, tree
from fedloom.bound import Bound, BoundPhase
from fedloom.data.augment import Augmentation, key_of
from fedloom.errors import UserError
from fedloom.optim import Optimizer, OptState
from fedloom.types import Batch, Leaves, Memory, Seen
from fedloom.view import View

if TYPE_CHECKING:
    from fedloom.client import Desk

Objective = Callable[..., tuple[Tensor, Memory]]
Group = tuple[list[int], Optimizer, float]

HISTORY = 10
"""How many past losses a phase's ``until`` sees."""


def objective(desk: Desk, bound_phase: BoundPhase, see: Callable[..., Seen] | None = None) -> Objective:
    """The sum of the terms of a phase, for one client: ``(leaves, private, batch, carry, step) -> (value, carry)``."""
    phase, bound = bound_phase.phase, desk.bound
    trained = tuple(bound.specs[n].local for n in bound_phase.trained)
    terms, seeing, augment = bound_phase.terms, see or desk.see, desk.work.augment
    carries = any(t.carry is not None for t in terms)

    def fn(
        leaves: Leaves, private: dict[str, Any], packed: dict[str, Any], carry: Memory, step: Tensor | int
    ) -> tuple[Tensor, Memory]:
        seen, batch = seeing(private), Batch.unpacked(packed)
        if augment is not None:
            batch = augmented(augment, batch, bound, key_of(seen.noise, step))
        if phase.view is not None:
            leaves = {**leaves, **phase.view(leaves, seen)}
        view = View(
            bound,
            leaves,
            batch,
            seen,
            copy=phase.copy,
            train=True,
            taps=bound_phase.taps,
            still=bound_phase.still,
            trained=trained,
            step=step,
        )
        total: Tensor | None = None
        carry = dict(carry) if carries else carry
        for term in terms:
            if term.carry is None:
                value = term.fn(view, batch, seen)
            else:
                value, moved = term.fn(view, batch, seen, carry[term.owner])
                carry[term.owner] = {k: v.detach() for k, v in moved.items()}
            total = value if total is None else total + value
        assert total is not None, f"phase {phase.name!r} has no term"
        return total, carry

    return fn


def augmented(augment: Augmentation, batch: Batch, bound: Bound, key: Tensor) -> Batch:
    """A training batch as the run's augmentation changes it: inputs are scaled first, as the network would."""
    x = bound.network.prepared(batch.x)
    if not isinstance(x, Tensor):
        raise UserError("augment: the model has several inputs; expected one tensor of pictures")
    with torch.no_grad():
        x, y = augment(x, batch.y, key)
    pair = None if batch.pair is None else augmented(augment, batch.pair, bound, rng.fold(key, 1))
    return Batch(x, y, batch.mask, pair)


class Stepper:
    """Moves the leaves of a phase, batch by batch.

    Args:
        desk: where the clients work.
        phase: the phase.
        leaves: every leaf; in their place the dictionary gets the stepper's own of those that steps change.

    Attributes:
        late: whether these are made when they are first needed, if at all.
    """

    late = False

    def __init__(self, desk: Desk, phase: BoundPhase, leaves: Leaves) -> None:
        self.desk, self.phase, self.leaves = desk, phase, leaves
        self.private: dict[str, Any] = desk.private
        self.see = desk.see  # what projections see; a captured step reads it from fixed addresses
        self.params = [leaves[n] for n in phase.trained]
        if not self.late:
            self.take()
        self.groups: list[Group] = []
        self.states: list[OptState] = []
        self.before: int | Tensor = 0
        self.objective = objective(desk, phase)
        self.carry: Memory = {t.owner: self._carry(t.carry) for t in phase.terms if t.carry is not None}
        self.made = 0
        self.total: Tensor | None = None
        self.moved: Tensor | None = None
        self.history: Tensor | None = None
        self.going: Tensor | None = None

    def take(self) -> None:
        """Copies what steps change: trained leaves, and the buffers of the phase's copy of the model."""
        leaves, names = self.leaves, self.phase.trained
        for spec in self.desk.bound.specs.values():
            if spec.copy == self.phase.phase.copy and spec.buffer:
                leaves[spec.name] = leaves[spec.name].clone()
        self.params = [v.requires_grad_() for v in tree.copies([leaves[n] for n in names])]
        leaves |= dict(zip(names, self.params, strict=True))
        self.late = False

    def batches(self) -> Iterator[tuple[Batch, Tensor | None]]:
        """The batches of the phase, and which clients take part in each (None: all)."""
        yield from self.desk.layout.batches(self.desk, self.phase)

    def goes_on(self, active: Tensor | None) -> tuple[bool, Tensor | None]:
        """Whether any client goes on, and which, by the phase's ``until``."""
        until = self.phase.phase.until
        if until is None:
            return True, active
        n: Tensor = self.private["n"]
        if self.history is None:
            self.history = n.new_full((*n.shape, HISTORY), torch.inf)
        step = torch.full_like(n, float(self.made))
        now: Tensor = self.desk.layout.call(
            lambda private, h, s: until(self.desk.see(private), h, s), self.private, self.history, step
        )
        self.going = now if self.going is None else self.going & now
        alone = self.going.dim() == 0  # of several, those that have stopped are held still meanwhile
        if (alone or self._may_stop()) and not bool(self.going.any()):
            return False, active
        if alone:
            return True, None
        return True, self.going if active is None else active.bool() & self.going

    def step(self, batch: Batch, active: Tensor | None) -> None:
        """All that happens with one batch: ``repeat`` gradient steps, each projected, and what comes after."""
        phase = self.phase.phase
        packed = batch.packed()
        for _ in range(phase.repeat):
            losses, grads = self.gradients(packed)
            self.move(grads, active)
            if phase.project is not None:
                self.assign(phase.project, active)
        if phase.after is not None:
            self.assign(phase.after, active)
        self.note(losses, active)

    def finish(self) -> None:
        """What remains to be done after the last step."""

    def gradients(self, packed: dict[str, Any]) -> tuple[Tensor, list[Tensor | None] | None]:
        """Losses and gradients; None where the objective does not reach any leaf."""
        losses, self.carry = self.objective(self.leaves, self.private, packed, self.carry, self.number())
        if not losses.requires_grad:
            return losses, None
        grads = torch.autograd.grad(losses, self.params, allow_unused=True, materialize_grads=bool(self.groups))
        return losses.detach(), list(grads)

    def move(self, grads: list[Tensor | None] | None, active: Tensor | None) -> None:
        """Steps of the optimisers. A leaf that the objective does not reach stays, as in ``torch.optim``."""
        if grads is None:
            return
        if not self.groups:
            self.begin({n for n, g in zip(self.phase.trained, grads, strict=True) if g is not None})
        params = self.params
        for (where, optimizer, lr), state in zip(self.groups, self.states, strict=True):
            known = [g if (g := grads[i]) is not None else torch.zeros_like(params[i]) for i in where]
            optimizer.step_([params[i] for i in where], known, state, lr, active, batched=self.stacked)

    stacked = False

    def note(self, losses: Tensor, active: Tensor | None) -> None:
        """Keeps account of the losses and of the steps made."""
        if self.history is not None:
            self.history = torch.cat([self.history[..., 1:], losses[..., None].to(self.history.dtype)], -1)
        if active is not None:
            losses = torch.where(active, losses, torch.zeros_like(losses))
            self.moved = active.to(self.private["n"].dtype) + (0 if self.moved is None else self.moved)
        self.total = losses if self.total is None else self.total + losses
        self.made += 1

    def count(self) -> Tensor:
        """Steps made by each client."""
        return torch.full_like(self.private["n"], float(self.made)) if self.moved is None else self.moved

    def counted(self) -> list[int] | None:
        """Steps made by each client as numbers, where they are known without asking the device."""
        return [self.made] * len(self.desk.participants) if self.moved is None else None

    def assign(self, fn: Callable[..., Leaves], active: Tensor | None) -> None:
        """Writes a pure function of the leaves back into them."""
        with torch.no_grad():
            for name, value in fn(self.leaves, self.see(self.private)).items():
                if name in self.phase.trained:
                    self.leaves[name].copy_(value)
                else:
                    self.leaves[name] = value

    def number(self) -> Tensor:
        """The number of the step as a tensor, where noise is drawn from it."""
        noise: Tensor = self.private["noise"]
        return torch.full_like(noise, self.made) if self.drawn else noise

    @property
    def drawn(self) -> bool:
        """Whether steps draw noise."""
        return self.desk.bound.network.noisy or self.desk.work.augment is not None

    def begin(self, used: set[str]) -> None:
        """Makes the optimisers of the leaves that the objective reaches."""
        work, post = self.desk.work, self.desk.post
        index = {n: i for i, n in enumerate(self.phase.trained)}
        for names, optimizer in self.phase.groups:
            chosen = optimizer or work.optimizer
            where = [index[n] for n in names if n in used]
            self.groups.append((where, chosen, chosen.lr_at(post.round, work.rounds)))
            self.states.append(chosen.init([self.params[i] for i in where]))
        name = self.phase.phase.name
        kept = [own for p in self.desk.participants if work.keep_optimizer and (own := p.state.optimizer.get(name))]
        if kept:
            # A copy: what is kept must not move while the model is adapted for evaluation, or if the reply is rejected.
            gather = self.desk.layout.gather
            together = list(zip(*(copy.deepcopy(k) for k in kept), strict=True))
            self.before = kept[0][0].step
            self.states = [
                OptState(
                    {k: [gather(each) for each in zip(*(s.slots[k] for s in own), strict=True)] for k in own[0].slots},
                    own[0].step,
                )
                for own in together
            ]

    def kept(self) -> list[OptState]:
        """The state of the optimisers, of the only client of a run that keeps it: the same in every layout."""
        split = self.desk.layout.split
        return [OptState({k: [split(t)[0] for t in v] for k, v in s.slots.items()}, s.step) for s in self.states]

    def _may_stop(self) -> bool:
        """Whether to look if all of several clients have stopped; on CUDA that waits for the device, hence not at every step."""
        return not self.private["n"].is_cuda or self.made % 16 == 0

    def _carry(self, init: Callable[..., Leaves]) -> Leaves:
        value = init(self.desk.bound.structure)
        device = self.private["n"].device
        gather, people = self.desk.layout.gather, self.desk.participants
        return {k: gather([v.to(device)] * len(people)) for k, v in value.items()}
