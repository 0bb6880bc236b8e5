"""FedAIMS: a shared body and a personal head; each client supervises one intermediate block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from fedloom.methods.fedper import fedper
from fedloom.plugins.aims.aims import aims
from fedloom.spec.method import Method, compose
from fedloom.spec.registry import recipe

_FEDAIMS = "Li et al., FedAIMS: Adaptive Intermediate Supervision for Personalized Federated Learning, 2025"


@recipe("mu >= 0", "0 < lam <= 1", "period >= 1", paper=_FEDAIMS + ", Algorithm 1", plugin="aims")
def fedaims(
    mu: float = 1.0,
    lam: float | None = None,
    assign: Literal["cluster", "random", "round_robin"] = "cluster",
    similarity: Literal["raw", "delta"] = "raw",
    period: int = 1,
    prototypes: Literal["last", "blockwise"] = "last",
    aux_ce: Literal["head", "none", "prototype"] = "head",
    reduction: Literal["mean", "sum_dim"] = "mean",
    weights: Literal["fixed", "adaptive"] = "fixed",
) -> Method:
    """A shared body and a personal head; each client supervises one intermediate block: ``lambda F + (1 - lambda) A^b``.

    Args:
        mu: weight of the distances to the classes' prototypes.
        lam: lambda; None for 1/m, m the number of blocks.
        assign: how blocks are given to clients: Algorithm 2, at random, or in turn.
        similarity: of the uploaded bodies, or of what the round changed in them.
        period: rounds between updates of the similarity.
        prototypes: of the last block, mapped by personal adapters, or of every block.
        aux_ce: cross-entropy at a block by an auxiliary head, none, or over distances to prototypes.
        reduction: distances are means over dimensions, or sums.
        weights: lambda and mu as given, or following the losses: ``lambda = CE^b / (CE + CE^b)``, ``mu CE`` for mu.
    """
    plugin = aims(
        mu=mu, lam=lam, assign=assign, similarity=similarity, period=period, prototypes=prototypes, aux_ce=aux_ce,
        reduction=reduction, weights=weights,
    )  # fmt: skip
    return compose(fedper(), plugin)


@recipe("mu >= 0", paper=_FEDAIMS + ", eq. 2 (FedAIMS-Full)", plugin="aims")
def fedaims_full(
    mu: float = 1.0,
    alpha: Sequence[float] | None = None,
    prototypes: Literal["last", "blockwise"] = "last",
    aux_ce: Literal["head", "none", "prototype"] = "head",
    reduction: Literal["mean", "sum_dim"] = "mean",
) -> Method:
    """FedAIMS with all intermediate blocks supervised by every client: ``alpha_m F + sum_j alpha_j A^j``.

    Args:
        mu: weight of the distances to the classes' prototypes.
        alpha: weights of the m blocks, main task last, which sum to 1; None for 1/m each.
        prototypes: of the last block, mapped by personal adapters, or of every block.
        aux_ce: cross-entropy at a block by an auxiliary head, none, or over distances to prototypes.
        reduction: distances are means over dimensions, or sums.
    """
    plugin = aims(mu=mu, supervise="full", alpha=alpha, prototypes=prototypes, aux_ce=aux_ce, reduction=reduction)
    return compose(fedper(), plugin)
