"""A phase that clients leave by themselves (``Phase.until``)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from fedloom.clients.arrangement import Arrangement, Slot
from fedloom.clients.inputs import ClientInputs
from fedloom.types import Seen

HISTORY = 10
"""How many past losses a phase's ``until`` sees."""


class StopRule:
    """Which clients go on. Who has stopped never moves again, and of a wave its rows are masked."""

    def __init__(self, until: Callable[[Seen, Tensor, Tensor], Tensor], inputs: ClientInputs, arrangement: Arrangement):
        self.until, self.inputs, self.several = until, inputs, arrangement.several
        self.map = arrangement.map
        n: Tensor = inputs.own["n"]
        self.n, self.history = n, n.new_full((*n.shape, HISTORY), torch.inf)
        self.going: Tensor | None = None
        self.step_count, self.moved = 0, torch.zeros_like(n)

    def next(self, slot: Slot) -> Slot | None:
        """The slot for the clients that go on; None if none does."""
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
        """Whether to look if all clients have stopped; on CUDA that waits for the device, hence not at every step."""
        return not self.n.is_cuda or self.step_count % 16 == 0

    def record(self, losses: Tensor | None, active: Tensor | None) -> None:
        """Keeps account of a step."""
        assert losses is not None, "a runner of phases that stop by themselves returns the losses"
        self.history = torch.cat([self.history[..., 1:], losses[..., None].to(self.history.dtype)], -1)
        self.moved += 1 if active is None else active.to(self.n.dtype)
        self.step_count += 1

    def steps(self) -> Tensor:
        """Steps made by each client."""
        return self.moved

    def counts(self, clients: int) -> list[int] | None:
        """The same as numbers, where they are known without waiting for the device."""
        return None if self.several else [self.step_count] * clients
