"""FedAvg with supervised intermediate layers: clients minimise ``CE + sum_m alpha_m MI_m + lambda_m NE_m``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from fedloom.methods.fedavg import fedavg
from fedloom.plugins.isr import isr
from fedloom.spec.method import Method, compose
from fedloom.spec.registry import recipe


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
