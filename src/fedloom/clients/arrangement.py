"""The layout of tensors and batches: of one client, or of a wave of clients along axis 0.

Client code is written for one client. Only the :class:`Arrangement` differs between one client and
a wave. A :class:`BatchSchedule` is the only source of batches, for training steps and for sweeps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from fedloom.clients import batches
from fedloom.clients.batches import Steps
from fedloom.data import Rows
from fedloom.devices import to_device_async
from fedloom.network.functional import Network
from fedloom.network.memory_format import suited
from fedloom.tasks.batch import Batch
from fedloom.tensors import Leaves


@dataclass(frozen=True, slots=True)
class Slot:
    """One step of a schedule.

    Args:
        step: the number of the step.
        clients: number of clients that take part, the first ones of the wave.
        widths: rows of each client's batch; a step on pairs of batches has two numbers.
        padded: whether some of these rows are padding.
        active: which of the clients the step changes, shape ``(clients,)``; None for all.
        hide: whether the rows of the other clients are masked too.
    """

    step: int
    clients: int = 1
    widths: tuple[int, ...] = ()
    padded: bool = False
    active: Tensor | None = None
    hide: bool = False


class BatchSchedule(Protocol):
    """Steps in order, and the batch of each step.

    Members are properties, so that a class may declare narrower types.
    """

    @property
    def slots(self) -> Sequence[Slot]:
        """The steps."""

    @property
    def counts(self) -> Sequence[int]:
        """Steps of each client."""

    def batch(self, slot: Slot) -> Batch:
        """Return the rows of a step; in a wave, pad and mask the shorter batches."""

    def unpad(self, values: Tensor) -> Sequence[Tensor]:
        """Return each client's values of real rows.

        Args:
            values: one value per row of all batches, concatenated, padding included.
        """


class ClientSchedule:
    """The steps of one client: rows selected by their index."""

    def __init__(self, rows: Rows, steps: Steps) -> None:
        self.rows, self.steps, self.counts = rows, steps, [len(steps)]
        self.slots = [Slot(number) for number in range(len(steps))]

    def batch(self, slot: Slot) -> Batch:
        """Return the rows of a step."""
        batch: Batch | None = None
        for index in reversed(self.steps[slot.step]):
            rows = self.rows.take(to_device_async(torch.from_numpy(index), self.rows.y.device))
            batch = Batch(rows.x, rows.y, pair=batch)
        assert batch is not None
        return batch

    def unpad(self, values: Tensor) -> Sequence[Tensor]:
        """Return the values: no row is padding."""
        return (values,)


Shapes = Literal["narrow", "all", "fixed"]
"""Shapes of the steps of a wave: ``"narrow"`` leaves out clients without further rows, ``"all"``
has all clients in every step, ``"fixed"`` has the same shape in every step."""


class Arrangement(Protocol):
    """The layout of the clients' tensors: as they are, or stacked along axis 0."""

    several: bool
    """Whether axis 0 of every tensor is the client."""

    def stack(self, values: Sequence[Tensor], *, copy: bool = False) -> Tensor:
        """Join one tensor per client.

        With ``copy`` the clients share no memory; without, the result may expand one tensor.
        """

    def unstack(self, value: Tensor) -> Sequence[Tensor]:
        """Return each client's part of a tensor, as views."""

    def map(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Turn a function of one client's tensors into one of all clients' tensors.

        The result for a client must not depend on tensors of other clients: steps differentiate the
        sum of the clients' losses, which gives each client its own gradient only then.
        """

    def to_memory_format(self, network: Network, leaves: Leaves) -> Leaves:
        """Return the leaves in the memory format in which the network computes fastest."""

    def schedule(
        self, parts: Sequence[Rows], steps: Sequence[Steps], dtype: torch.dtype, shapes: Shapes
    ) -> BatchSchedule:
        """Return the steps with these row indices of each client."""

    def sweep(self, parts: Sequence[Rows], size: int | str, dtype: torch.dtype, *, narrow: bool) -> BatchSchedule:
        """Return one pass over all rows in order.

        With ``narrow``, later batches may leave out clients without further rows.
        """


class OneClient:
    """The arrangement of one client: tensors as they are."""

    several = False

    def stack(self, values: Sequence[Tensor], *, copy: bool = False) -> Tensor:
        """Return the only value, or a copy of it."""
        return values[0].clone() if copy else values[0]

    def unstack(self, value: Tensor) -> Sequence[Tensor]:
        """Return the value as the only part."""
        return (value,)

    def map(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function."""
        return fn

    def to_memory_format(self, network: Network, leaves: Leaves) -> Leaves:
        """Put the channels of filters last, where the network computes faster with them."""
        return {k: suited(v) for k, v in leaves.items()} if network.channels_last else dict(leaves)

    def schedule(
        self, parts: Sequence[Rows], steps: Sequence[Steps], dtype: torch.dtype, shapes: Shapes
    ) -> BatchSchedule:
        """Return the steps of the only client."""
        return ClientSchedule(parts[0], steps[0])

    def sweep(self, parts: Sequence[Rows], size: int | str, dtype: torch.dtype, *, narrow: bool) -> BatchSchedule:
        """Return all rows of the only client, in order."""
        ranges = batches.in_order(len(parts[0]), size)
        return ClientSchedule(parts[0], [(np.arange(low, high),) for low, high in ranges])


ONE_CLIENT = OneClient()
