"""Facts of a phase that its first round shows and that later rounds need in advance."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor

from fedloom.clients.arrangement import Slot
from fedloom.clients.step import EagerRunner, StepState

Reached = dict[Hashable, tuple[set[str], set[str]]]
"""By phase: the leaves that its objective reaches, and those that its steps write."""


class FirstRound:
    """Runs steps eagerly, then records which leaves the objective reaches and which are written."""

    def __init__(self, runner: EagerRunner, store: Reached, phase: Hashable) -> None:
        self.runner, self.store, self.phase = runner, store, phase
        self.schedule: Any = runner.schedule

    def run(self, slot: Slot) -> Tensor:
        """Make one step."""
        return self.runner.run(slot)

    def finish(self) -> StepState:
        """Record the leaves and return the state after the last step."""
        state = self.runner.state
        if state.groups is not None:
            self.store[self.phase] = ({n for g in state.groups for n in g.names}, set(state.written))
        return self.runner.finish()
