"""Phases that end for each client by a rule (``Phase.until``)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from fedloom.clients.arrangement import Arrangement, Slot
from fedloom.clients.inputs import ClientInputs
from fedloom.spec.seen import Seen

HISTORY = 10
"""Number of past losses that ``until`` reads."""


class StopRule:
    """Applies ``until`` before each step. A client that has stopped does not start again.

    In a wave all clients stay in every step: the history has one row per client. The rows of
    stopped clients are masked, because their losses may otherwise become NaN or infinite.

    Args:
        until: ``(seen, losses, steps) -> bool tensor``: whether a client continues.
        inputs: what ``until`` reads.
        arrangement: the layout of the clients.
    """

    def __init__(self, until: Callable[[Seen, Tensor, Tensor], Tensor], inputs: ClientInputs, arrangement: Arrangement):
        self.until, self.inputs, self.several = until, inputs, arrangement.several
        self.map = arrangement.map
        n: Tensor = inputs.own["n"]
        self.n, self.history = n, n.new_full((*n.shape, HISTORY), torch.inf)
        self.going: Tensor | None = None
        self.step_count, self.moved = 0, torch.zeros_like(n)

    def next(self, slot: Slot) -> Slot | None:
        """Return the slot for the clients that continue; None if no client continues."""
        step = torch.full_like(self.n, float(self.step_count))
        decide = self.map(lambda own, losses, step: self.until(self.inputs.seen(own), losses, step))
        now: Tensor = decide(self.inputs.own, self.history, step)
        self.going = now if self.going is None else self.going & now
        if (not self.several or self.may_stop()) and not bool(self.going.any()):
            return None
        if not self.several:
            return slot
        active = self.going if slot.active is None else slot.active.bool() & self.going
        return replace(slot, active=active, hide=True)

    def may_stop(self) -> bool:
        """Return whether to check if all clients have stopped, which waits for the device."""
        return not self.n.is_cuda or self.step_count % 16 == 0

    def record(self, losses: Tensor | None, active: Tensor | None) -> None:
        """Record the losses and the clients of a step."""
        assert losses is not None, "runners of phases with `until` return the losses"
        self.history = torch.cat([self.history[..., 1:], losses[..., None].to(self.history.dtype)], -1)
        self.moved += 1 if active is None else active.to(self.n.dtype)
        self.step_count += 1

    def steps(self) -> Tensor:
        """Return the number of steps of each client."""
        return self.moved

    def counts(self, clients: int) -> list[int] | None:
        """Return the numbers of steps on the host; None if the device would have to be read."""
        return None if self.several else [self.step_count] * clients
