"""FedExP: a server step that grows with the clients' disagreement, ``w <- w + eta_g dbar``."""

from __future__ import annotations

import torch

from fedloom import tensors
from fedloom.methods.fedavg import fedavg
from fedloom.spec.method import Method
from fedloom.spec.parts import ServerStage, Stage
from fedloom.spec.reducers import mean
from fedloom.spec.registry import recipe
from fedloom.spec.seen import Cohort, Seen
from fedloom.tensors import Leaves, Memory, Message


@recipe(
    "eps >= 0",
    paper="Jhunjhunwala et al., FedExP: Speeding Up Federated Averaging via Extrapolation, ICLR 2023, Algorithm 1",
    presets={"emnist": {"eps": 0.1}},
)
def fedexp(eps: float = 1e-3) -> Method:
    """FedAvg with a step length that grows when clients disagree: ``w <- w + eta_g dbar``.

    ``eta_g = max(1, sum_k ||d_k||^2 / (2 M (||dbar||^2 + eps)))``, ``d_k = theta_k - w``, ``dbar = mean_k d_k`` (uniform); norms
    are over all trainable shared leaves jointly. The model that is tested is the mean of the last two w.

    Args:
        eps: keeps the step bounded; constant over rounds.
    """

    def measure(message: Message, memory: Leaves, seen: Seen) -> tuple[Message, Leaves]:
        shared = {name: seen.gated(name, d) for name, d in message["delta"].items()}
        return {**message, "fedexp": {"square": tensors.square_norm(shared)}}, memory

    def before(leaves: Leaves) -> Leaves:
        return {f"before:{name}": value for name, value in leaves.items()}

    def stretch(reduced: Message, memory: Leaves, cohort: Cohort) -> tuple[Message, Leaves]:
        dbar = reduced["delta"]
        # dbar = 0 makes any step the same; the smallest normal number keeps the quotient a number.
        bottom = (2 * (tensors.square_norm(dbar) + eps)).clamp(min=torch.finfo(torch.float32).tiny)
        eta_g = (reduced["fedexp"]["square"] / bottom).clamp(min=1.0)
        return {**reduced, "delta": tensors.scale(dbar, eta_g)}, before(tensors.select(cohort.leaves, dbar))

    def tested(leaves: Leaves, memory: Memory) -> Leaves:
        kept = memory["fedexp"]
        return {n: (v + kept[f"before:{n}"]) / 2 if f"before:{n}" in kept else v for n, v in leaves.items()}

    stage = Stage(owner="fedexp", fn=measure, entries={"fedexp": mean("uniform")})
    server = ServerStage(owner="fedexp", fn=stretch, memory=lambda facts: before(facts.travelling(extra=None)))
    method = fedavg().replacing_reducer("fedexp", "delta", mean("uniform"))
    return method.adding(stages=(stage,), server=(server,)).replacing_evaluation("fedexp", tested=tested)
