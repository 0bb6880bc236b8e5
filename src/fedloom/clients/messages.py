"""What passes between the server, the engines and the clients."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from fedloom.clients.states import ClientState
from fedloom.data import Rows
from fedloom.data.augment import Augmentation
from fedloom.spec.optimizer import Optimizer
from fedloom.tensors import Leaves, Memory, Message


@dataclass(frozen=True, slots=True)
class Site:
    """A client's data where they are computed with.

    Args:
        id: the client.
        train: training rows.
        test: test rows, if any.
        val: validation rows, if any.
        labels: training labels on the host, for samplers; of pictures with a label per pixel, the classes each holds
            (pictures x classes).
        counts: training rows per class, on the device.
    """

    id: str
    train: Rows
    test: Rows | None
    val: Rows | None
    labels: np.ndarray
    counts: Tensor


@dataclass(frozen=True, slots=True)
class Participant:
    """A client that is asked to work."""

    site: Site
    state: ClientState
    addressed: Memory = field(default_factory=dict)
    key: Hashable = None
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class Post:
    """What the server sends to everybody, and the facts of the round.

    Args:
        leaves: the server's leaves.
        broadcast: tensors of server stages, by owner.
        gate: per gated leaf 1 (shared) or 0 (personal).
        round: the round, from 1.
        cohort: number of clients asked.
        population: number of clients there are.
        off: the gated leaves that are personal, where the host knows them without asking the device.
    """

    leaves: Leaves
    broadcast: Memory
    gate: Leaves
    round: int
    cohort: int
    population: int
    off: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class Work:
    """How clients work in a run: the options that are the same for all of them.

    ``augment`` is applied to every training batch before the forward pass, never in sweeps or tests.
    """

    epochs: int
    batch_size: int | str
    optimizer: Optimizer
    seed: int
    rounds: int | None = None
    keep_optimizer: bool = False
    augment: Augmentation | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """What comes back from a client.

    Args:
        id: the client.
        message: its upload.
        state: what it keeps, to be stored once the reply is accepted.
        steps: optimiser steps made, by phase.
        loss: mean of the objective over the steps of the phases, or None. A tensor on the device until the server reads
            it together with its checks (:func:`fedloom.rounds.server.confirm`).
        judged: statistics (sums, kept rows) by name of the :class:`Judge`.
        fault: why there is nothing to use, where an engine's clients can fail to answer.
    """

    id: str
    message: Message
    state: ClientState
    steps: dict[str, int]
    loss: float | Tensor | None
    judged: dict[str, tuple[Leaves, Leaves]]
    fault: str | None = None
