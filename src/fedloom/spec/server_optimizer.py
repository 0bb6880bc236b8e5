"""Server optimisers: the clients' mean update D taken as a direction, leaf by leaf, with state."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from fedloom.spec.leaves import Facts
from fedloom.spec.parts import ServerStage
from fedloom.spec.seen import Cohort
from fedloom.tensors import Leaves, Message

Step = Callable[[Tensor, Leaves], tuple[Tensor, Leaves]]


def server_step(owner: str, state: Mapping[str, float], step: Step) -> ServerStage:
    """A server stage that replaces the update D of every trainable shared leaf by a step with state.

    Buffers are not touched: they stay plainly averaged. State is kept per leaf as ``name/leaf``, so that a leaf that is
    personal in a round starts afresh when it is shared again.

    Args:
        owner: the recipe or plug-in.
        state: names of the state tensors and the number each begins with.
        step: ``(D, state) -> (move, state)`` for one leaf.
    """

    def memory(facts: Facts) -> Leaves:
        leaves = facts.travelling(extra=None)
        return {f"{s}/{n}": torch.full_like(v, start) for s, start in state.items() for n, v in leaves.items()}

    def fn(reduced: Message, kept: Leaves, cohort: Cohort) -> tuple[Message, Leaves]:
        moves: Leaves = {}
        kept = dict(kept)
        for name, delta in reduced.get("delta", {}).items():
            moves[name], new = step(delta, {s: kept[f"{s}/{name}"] for s in state})
            kept.update({f"{s}/{name}": value for s, value in new.items()})
        return {**reduced, "delta": moves}, kept

    return ServerStage(owner=owner, fn=fn, memory=memory)
