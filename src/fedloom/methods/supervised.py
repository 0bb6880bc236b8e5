"""Methods that supervise intermediate layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from fedloom.methods.averaging import fedavg
from fedloom.methods.personalised import fedper
from fedloom.plugins.aims import aims
from fedloom.plugins.isr import isr
from fedloom.record import Method, compose
from fedloom.registry import recipe


@recipe(
    paper="OmniISR: intermediate supervision and regularisation for centralised, federated and hybrid training",
    plugin="isr",
)
def omniisr(
    alpha: float | Sequence[float] = 0.1,
    lam: float | Sequence[float] = 0.01,
    points: int | str | Sequence[str] | None = None,
    spacing: int | None = None,
    position: Literal["input", "middle", "output"] = "input",
    adapters: Literal["shared", "personal"] = "shared",
    weights: Literal["fixed", "adaptive"] = "fixed",
) -> Method:
    """FedAvg with supervised intermediate layers: clients minimise ``CE + sum_m alpha_m MI_m + lambda_m NE_m``.

    Args:
        alpha: weight of the cross-entropy of the adapters: a number, or one per tap.
        lam: weight of the negative entropy of the features: likewise.
        points: number of taps, or name or names of modules; None for 3, or as many as the model has.
        spacing: distance of the taps in the list of candidates; None for 2, or what fits.
        position: ``"input"``, ``"middle"`` or ``"output"``.
        adapters: ``"shared"`` or ``"personal"``.
        weights: alpha and lam as given, or following the task's loss L: ``alpha_m min(1, L / MI_m)``, ``lambda_m L``.
    """
    return compose(fedavg(), isr(alpha, lam, points, spacing, position, adapters, weights))


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
