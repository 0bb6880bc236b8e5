"""FedLAG: FedAvg whose k layers with the most conflicting updates are personal (see ``lag``)."""

from __future__ import annotations

from typing import Literal

from fedloom.methods.fedavg import fedavg
from fedloom.plugins.lag import PAPER, Select, lag
from fedloom.spec.method import Method, compose
from fedloom.spec.registry import recipe


@recipe("k >= 0", "-1 <= xi <= 2", "warmup >= 0", paper=PAPER, plugin="lag")
def fedlag(
    k: int = 5,
    xi: float = 0.0,
    weights: Literal["uniform", "samples"] = "uniform",
    schedule: Literal["per_round", "warmup_once", "warmup_then_per_round"] = "per_round",
    granularity: Literal["layer", "tensor"] = "layer",
    warmup: int = 30,
    select: Select = "conflict",
    norm: Literal["shared", "personal"] = "shared",
    score: Literal["conflict", "variance"] = "conflict",
    require_conflict: bool = True,
) -> Method:
    """FedAvg in which the k layers with the most conflicting updates stay with the clients (see ``lag``).

    ``theta_lu <- mean_u theta_lu`` where l is shared, ``theta_lu`` stays where it is personal (eqs. 4, 5). The mean is uniform, as
    printed, unless ``weights="samples"``.

    Args:
        k: number of personal layers; 0 is FedAvg bit for bit.
        xi: pairs of clients count as conflicting below this cosine.
        weights: ``"uniform"`` or ``"samples"``.
        schedule: when the layers are chosen.
        granularity: ``"layer"`` or ``"tensor"``.
        warmup: rounds of the warm-up.
        select: how they are chosen.
        norm: whether batch normalisation is shared.
        score: what they are ranked by.
        require_conflict: a layer with score 0 stays shared.
    """
    base = fedavg("uniform" if weights == "uniform" else "n")
    return compose(base, lag(k, xi, weights, schedule, granularity, warmup, select, norm, score, require_conflict))
