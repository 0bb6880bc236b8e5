"""The values that client code and server stages can read besides leaves and batch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedloom.spec.leaves import Kind, LeafSpec, choose
from fedloom.tensors import Leaves, Memory


@dataclass(frozen=True, slots=True)
class SummaryRequest:
    """A tap of which client code reads the summary only; see :func:`summary_of`."""

    name: str


def summary_of(name: str) -> SummaryRequest:
    """Request a tap, channels on axis 1, for ``view.summary(name)``: ``taps=(summary_of("block2"),)``.

    If all terms that tap it request its summary, a kernel may compute that along with the layer, and
    neither the feature nor its gradient need be in memory. ``view.summary`` answers for any tap.
    """
    return SummaryRequest(name)


TapName = str | SummaryRequest
"""What a term, a sweep or a predict route names in ``taps``."""


@dataclass(frozen=True, slots=True)
class Seen:
    """All that a client's code may see besides its leaves and its batch.

    Everything but the last group is a tensor or a dictionary of tensors of ONE client.

    Args:
        received: the server's leaves, as sent in this round; the anchor of proximal terms.
        start: the leaves from which this client began the round.
        broadcast: what server stages sent to everybody, by owner.
        addressed: what server stages sent to this client alone, by owner.
        memory: this client's own memory, by owner.
        swept: results of the sweeps made so far in this program, by name.
        gate: per leaf 1 (shared in this round) or 0 (personal in this round); absent means 1.
        steps: number of optimiser steps really made, by phase.
        n: number of training rows.
        counts: training rows per class (empty where the task has no classes).
        first: 1 in the client's first participation, else 0.
        noise: counter key of this client, round and phase.
        final: the leaves at the end of training (in upload stages only).
        round: the round, from 1.
        lr: the run's learning rate in this round.
        cohort: number of clients in this round.
        population: number of clients in the federation.
        key: the key that a server stage gave this client, or None. It is a tensor where clients with
            different keys run in one wave (see ``Prepare.client_key``); test it with :meth:`selects`.
        specs: the facts of every leaf.
        rates: learning rate of each phase in this round.
        momenta: momentum of each phase's SGD; 0 without, and for other optimisers.
        personal: gated leaves of which the host knows that they are personal in this round (in upload stages only).
    """

    received: Leaves
    start: Leaves
    broadcast: Memory
    addressed: Memory
    memory: Memory
    swept: Memory
    gate: Leaves
    steps: Leaves
    n: Tensor
    counts: Tensor
    first: Tensor
    noise: Tensor
    final: Leaves = field(default_factory=dict)
    round: int = 1
    lr: float = 0.0
    cohort: int = 1
    population: int = 1
    key: Hashable | Tensor = None
    specs: Mapping[str, LeafSpec] = field(default_factory=dict)
    rates: Mapping[str, float] = field(default_factory=dict)
    momenta: Mapping[str, float] = field(default_factory=dict)
    personal: Collection[str] = ()

    def selects(self, key: Hashable) -> bool | Tensor:
        """Return whether this client has a key: a bool for one client, a tensor in a wave."""
        return self.key == key

    def base(self, name: str) -> Tensor:
        """What a leaf that travels is measured from: the received one, or the client's own start where it is personal in this round."""
        gate = self.gate.get(name)
        if gate is None:
            return self.received[name]
        if name in self.personal:
            return self.start[name]
        return torch.where(gate.bool(), self.received[name], self.start[name])

    def gated(self, name: str, value: Tensor) -> Tensor:
        """``value`` where the leaf is shared in this round, zero where it is personal (exact: times 0 or 1)."""
        gate = self.gate.get(name)
        return value if gate is None else value * gate

    def steps_of(self, name: str) -> Tensor:
        """Optimiser steps really made so far on a leaf."""
        total = torch.zeros_like(self.n)
        for phase in self.specs[name].phases:
            if phase in self.steps:
                total = total + self.steps[phase]
        return total

    def lr_of(self, name: str) -> float:
        """Learning rate of the last phase that trains a leaf."""
        phases = self.specs[name].phases
        return self.rates[phases[-1]] if phases else self.lr

    def names(
        self, *kinds: Kind, copy: str = "main", trainable: bool | None = True, extra: bool | None = None
    ) -> tuple[str, ...]:
        """Names of the leaves of some kinds.

        Args:
            *kinds: the kinds; none for any.
            copy: of which copy of the model.
            trainable: True for trainable leaves, False for the others, None for both.
            extra: True for plug-ins' leaves, False for the user's model, None for both.
        """
        return choose(self.specs, kinds, copy, trainable, extra)


@dataclass(frozen=True, slots=True)
class Cohort:
    """What a server stage knows of a round besides the reduced message.

    Args:
        ids: clients whose replies were accepted, in federation order.
        rows: their numbers of training rows.
        population: number of clients in the federation.
        round: the round, from 1.
        leaves: the server's leaves before the round.
        lr: the run's learning rate in this round.
        structure: the model's leaves and layers.
        seed: the run's seed, for seeded choices.
        order: every client of the federation, in order.
        rounds: number of rounds of the run, where it is known.
    """

    ids: tuple[str, ...]
    rows: tuple[int, ...]
    population: int
    round: int
    leaves: Leaves
    lr: float
    structure: Any
    seed: int = 0
    order: tuple[str, ...] = ()
    rounds: int | None = None

    def __len__(self) -> int:
        return len(self.ids)


ReceiveRule = Callable[[Leaves, Seen], Leaves]
"""``(start, seen) -> start``: changes the leaves from which a client begins, given the plain rule's."""
