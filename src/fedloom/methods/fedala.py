"""FedALA: clients start from ``old + (w - old) W`` in their last layers, with learned weights W in [0, 1]."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedloom.methods.fedavg import fedavg
from fedloom.spec.leaves import Facts
from fedloom.spec.method import Method
from fedloom.spec.optimizer import sgd
from fedloom.spec.parts import Extra, Phase, Receive, Sampler, Send, Stage
from fedloom.spec.registry import recipe
from fedloom.spec.seen import Seen
from fedloom.spec.structure import Pattern, Structure, matches
from fedloom.tensors import Leaves, Message

OWNER = "fedala"
SETTLED, PASSES = 0.1, 20


@recipe(
    "0 < share <= 1",
    "eta_w >= 0",
    paper="Zhang et al., FedALA: Adaptive Local Aggregation for Personalized Federated Learning, AAAI 2023, Algorithm 1",
    presets={"original": {"share": 0.8, "eta_w": 1.0}, "fedaims": {"share": 0.1, "eta_w": 0.1}},
)
def fedala(share: float = 0.8, eta_w: float = 1.0, leaves: Pattern = "head") -> Method:
    """FedAvg whose clients start from ``old + (w - old) W`` in their last layers, with weights W in [0, 1] that they learn.

    ``old`` is the client's model at the end of its last round, W one weight per element, 1 at first. Before training,
    on a random share of the rows, ``W <- clip(W - eta_w grad_theta f (w - old), 0, 1)``: one pass, but the first time
    until the standard deviation of the last ten mini-batch losses is below 0.1, twenty passes at most. A client's first
    round skips this, as it has no old model. The other layers take w; batch normalisation is in evaluation mode
    meanwhile. A client is evaluated with the model that it would start from.

    Args:
        share: share of the rows on which W is learnt.
        eta_w: step of W; 0 leaves W at 1, which is FedAvg bit for bit.
        leaves: which leaves have weights.
    """

    def blended(start: Leaves, seen: Seen) -> Leaves:
        old = seen.memory[OWNER]
        weights = {n: start[f"{OWNER}:{n}"] for n in old if n in seen.specs}
        return {n: torch.lerp(old[n], seen.received[n], weight) for n, weight in weights.items()}

    def keep(message: Message, memory: Leaves, seen: Seen) -> tuple[Message, Leaves]:
        return message, {n: seen.final[n] for n in memory if n in seen.specs} | {"learnt": 1 - seen.first}

    def old_model(facts: Facts) -> Leaves:
        names = _chosen(facts.structure, leaves)
        like = next(v for v in facts.start.values() if v.is_floating_point())
        return {n: facts.start[n] for n in names} | {"learnt": like.new_zeros(())}

    def unsettled(seen: Seen, losses: Tensor, step: Tensor) -> Tensor:
        spread = losses.double().std(correction=0).round(decimals=10)
        return (seen.first == 0) & (seen.memory[OWNER]["learnt"] == 0) & ~(spread < SETTLED)

    def phase(name: str, epochs: int, until: Callable[[Seen, Tensor, Tensor], Tensor]) -> Phase:
        return Phase(
            name=name,
            leaves=f"{OWNER}:*",
            epochs=epochs,
            stream="blend",
            sampler=Sampler(fraction=share),
            optimizer=sgd(lr=eta_w),
            view=blended,
            project=lambda now, seen: {n: v.clamp(0, 1) for n, v in now.items() if n.startswith(f"{OWNER}:")},
            after=blended,
            eval_norm="norm",
            until=until,
        )

    learn = (
        phase("blend", 1, lambda seen, losses, step: seen.first == 0),
        phase("blend_first", PASSES - 1, unsettled),
    )
    begin = (Receive(), *learn) if eta_w else (Receive(),)
    weights = Extra(
        owner=OWNER,
        build=lambda structure, generator: {n: torch.ones(s) for n, s in _chosen(structure, leaves).items()},
        kind="personal",
        role="none",
    )
    return (
        fedavg()
        .replacing_schedule(OWNER, round=(*begin, Phase(), Send()), adapt=begin)
        .replacing_receive(OWNER, blended)
        .adding(extras=(weights,), stages=(Stage(owner=OWNER, fn=keep, memory=old_model),))
    )


def _chosen(structure: Structure, pattern: Pattern) -> dict[str, torch.Size]:
    return {i.name: i.shape for i in structure.leaves if i.trainable and not i.owner and matches(pattern, i)}
