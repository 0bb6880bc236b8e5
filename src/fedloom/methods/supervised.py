"""Methods that supervise intermediate layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from fedloom.methods.averaging import fedavg
from fedloom.plugins import isr
from fedloom.record import Method, compose
from fedloom.registry import recipe


@recipe(
    paper="OmniISR: intermediate supervision and regularisation for centralised, federated and hybrid training",
    plugin="isr",
)
def omniisr(
    alpha: float | Sequence[float] = 0.1,
    lam: float | Sequence[float] = 0.01,
    points: int | Sequence[str] | None = None,
    spacing: int | None = None,
    position: Literal["input", "middle", "output"] = "input",
    adapters: Literal["shared", "personal"] = "shared",
) -> Method:
    """FedAvg with supervised intermediate layers: clients minimise ``CE + sum_m alpha_m MI_m + lambda_m NE_m``.

    Args:
        alpha: weight of the cross-entropy of the adapters: a number, or one per tap.
        lam: weight of the negative entropy of the features: likewise.
        points: number of taps, or names of modules; None for 3, or as many as the model has.
        spacing: distance of the taps in the list of candidates; None for 2, or what fits.
        position: ``"input"``, ``"middle"`` or ``"output"``.
        adapters: ``"shared"`` or ``"personal"``.
    """
    return compose(fedavg(), isr(alpha, lam, points, spacing, position, adapters))
