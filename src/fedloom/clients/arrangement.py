"""How clients are laid out, tensors and rows: one client's as they are, or a wave's along axis 0.

Client code is written for one client. An :class:`Arrangement` is all that tells one client from many. A :class:`BatchSchedule`
is the only source of batches, of training steps and of sweeps alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from fedloom import batches
from fedloom.batches import Steps
from fedloom.data import Rows
from fedloom.network import Network
from fedloom.orders import suited
from fedloom.transfer import to_device_async
from fedloom.types import Batch, Leaves


@dataclass(frozen=True, slots=True)
class Slot:
    """One step of a schedule.

    Args:
        step: the number of the step.
        clients: the first so many clients of the wave take part.
        widths: rows of each client's batch, one number for each batch of the step.
        padded: whether some of these rows are padding.
        active: which of the clients move; None for all of them.
        hide: whether the rows of clients that do not move are masked too.
    """

    step: int
    clients: int = 1
    widths: tuple[int, ...] = ()
    padded: bool = False
    active: Tensor | None = None
    hide: bool = False


class BatchSchedule(Protocol):
    """Steps in order, and the batch of each."""

    @property
    def slots(self) -> Sequence[Slot]:
        """The steps."""

    @property
    def counts(self) -> Sequence[int]:
        """Steps of each client."""

    def batch(self, slot: Slot) -> Batch:
        """The rows of a step; in a wave with a client axis, shorter batches padded and masked."""

    def unpad(self, values: Tensor) -> Sequence[Tensor]:
        """Per client the values of its real rows, given those of all batches side by side."""


class ClientSchedule:
    """The steps of one client: rows picked by their index."""

    def __init__(self, rows: Rows, steps: Steps) -> None:
        self.rows, self.steps, self.counts = rows, steps, [len(steps)]
        self.slots = [Slot(number) for number in range(len(steps))]

    def batch(self, slot: Slot) -> Batch:
        """The rows of a step."""
        batch: Batch | None = None
        for index in reversed(self.steps[slot.step]):
            rows = self.rows.take(to_device_async(torch.from_numpy(index), self.rows.y.device))
            batch = Batch(rows.x, rows.y, pair=batch)
        assert batch is not None
        return batch

    def unpad(self, values: Tensor) -> Sequence[Tensor]:
        """Every row is real."""
        return (values,)


def in_order(rows: Rows, size: int | str) -> Steps:
    """The steps of a sweep: all rows, in data order."""
    return [(np.arange(low, high),) for low, high in batches.in_order(len(rows), size)]


Shapes = Literal["narrow", "all", "fixed"]
"""Steps of a wave: with the clients that still have rows, with all clients, or all of one shape."""


class Arrangement(Protocol):
    """How the tensors of the clients at work are laid out."""

    several: bool
    """Whether axis 0 of every tensor is the client."""

    def stack(self, values: Sequence[Tensor], *, copy: bool = False) -> Tensor:
        """Joins the clients' values of one tensor; with ``copy`` each in memory of its own."""

    def unstack(self, value: Tensor) -> Sequence[Tensor]:
        """The clients' values of one tensor, as views."""

    def map(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """A function of one client's tensors, for all clients."""

    def to_memory_format(self, network: Network, leaves: Leaves) -> Leaves:
        """The leaves in the memory format in which the network computes fastest."""

    def schedule(
        self, parts: Sequence[Rows], steps: Sequence[Steps], dtype: torch.dtype, shapes: Shapes
    ) -> BatchSchedule:
        """Steps on these rows, by each client's row indices."""

    def sweep(self, parts: Sequence[Rows], size: int | str, dtype: torch.dtype, *, narrow: bool) -> BatchSchedule:
        """One pass over all rows in order; with ``narrow`` clients whose rows are over may be left out."""


class OneClient:
    """Tensors as they are."""

    several = False

    def stack(self, values: Sequence[Tensor], *, copy: bool = False) -> Tensor:
        """The only value."""
        return values[0].clone() if copy else values[0]

    def unstack(self, value: Tensor) -> Sequence[Tensor]:
        """The only value."""
        return (value,)

    def map(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """The function itself."""
        return fn

    def to_memory_format(self, network: Network, leaves: Leaves) -> Leaves:
        """Filters with their channels last, where the network computes faster with them."""
        return {k: suited(v) for k, v in leaves.items()} if network.channels_last else dict(leaves)

    def schedule(
        self, parts: Sequence[Rows], steps: Sequence[Steps], dtype: torch.dtype, shapes: Shapes
    ) -> BatchSchedule:
        """Rows picked by their index."""
        return ClientSchedule(parts[0], steps[0])

    def sweep(self, parts: Sequence[Rows], size: int | str, dtype: torch.dtype, *, narrow: bool) -> BatchSchedule:
        """Slices of the rows."""
        return ClientSchedule(parts[0], in_order(parts[0], size))


ONE_CLIENT = OneClient()
