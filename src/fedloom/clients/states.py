"""Client state and server state: the content of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field

from fedloom.spec.optimizer import OptState
from fedloom.tensors import Leaves, Memory


@dataclass(frozen=True, slots=True)
class ServerState:
    """State of the server between two rounds.

    Args:
        leaves: every leaf; personal ones at their initial values.
        memory: memory of the server stages, by owner.
        round: number of completed rounds.
    """

    leaves: Leaves
    memory: Memory
    round: int = 0


@dataclass(slots=True)
class ClientState:
    """What a client keeps from round to round.

    Args:
        leaves: its own values of the leaves that it keeps.
        memory: its memory, by owner.
        rounds: how often it has taken part.
        optimizer: optimiser state per phase, where a run keeps it.
    """

    leaves: Leaves = field(default_factory=dict)
    memory: Memory = field(default_factory=dict)
    rounds: int = 0
    optimizer: dict[str, list[OptState]] = field(default_factory=dict)
