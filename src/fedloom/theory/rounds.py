"""Rounds T until the mean squared gradient is at most eps, by OmniISR's bounds turned round.

The values are real numbers: the first whole round at or above them serves. `eta=None` means the best step
size.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fedloom.theory.answer import Answer, Mode, Real, answer, check_mode, positive, real
from fedloom.theory.bounds import CL_STEP, FL_PRINTED, HYBRID_STEP


def _rounds(a: Any, b: Any, eta: Any, eps: Any) -> tuple[Any, Any]:
    """T and eta for (a/eta + b eta)/sqrt(T) = eps, with eta* = sqrt(a/b) where eta is None."""
    with np.errstate(divide="ignore", invalid="ignore"):
        eta = np.sqrt(a / b) if eta is None else positive("eta", eta)
        # With b = 0 the best step is infinite and costs nothing; 0 * inf would be nan.
        cost = np.where(np.isinf(eta), 0.0, a / eta + b * eta)
        return np.where(eps > 0, (cost / eps) ** 2, np.inf), eta


def rounds_cl(*, eps: Real, gap: Real, smoothness: Real, second_moment: Real, eta: Real | None = None) -> Answer:
    """Centralised rounds: T = ((2 Delta/eta + L eta V)/eps)^2; at the best step 8 Delta L V/eps^2.

    Args:
        eps: wanted mean squared gradient.
        gap: Delta = L(theta_0) - L*.
        smoothness: L.
        second_moment: V = G^2 + sigma^2.
        eta: step size, or None for the best.

    Example:
        >>> rounds_cl(eps=0.8, gap=1.0, smoothness=2.0, second_moment=3.0, eta=1.0).value
        100.0
        >>> rounds_cl(eps=0.4, gap=1.0, smoothness=2.0, second_moment=3.0).value
        300.0

    Reference: OmniISR, eq. 23.
    """
    eps, gap, lips = positive("eps", eps), positive("gap", gap), positive("smoothness", smoothness)
    value, eta = _rounds(2 * gap, lips * positive("second_moment", second_moment), eta, eps)
    return answer(
        "centralised rounds to eps (OmniISR, eq. 23)",
        value,
        conditions=[(CL_STEP, lips * eta <= np.sqrt(value))],
        terms={"eta": eta},
    )


def rounds_fl(
    *,
    eps: Real,
    gap: Real,
    smoothness: Real,
    second_moment: Real,
    steps: Real,
    heterogeneity: Real,
    c: Real = 1.0,
    eta: Real | None = None,
    mode: Mode = "paper",
) -> Answer:
    """Federated rounds: the centralised ones with V + c K^2 H (paper) or V + c K^2 (H + eps) (sound) for V.

    The paper's form is too small: it drops the A on the right of eq. 15, which at the target is eps.
    (Solving eq. 15 for sqrt T gives (2 Delta/eta + L eta (V + c K^2 H))/eps + L eta c K^2.) With ISR, give
    kappa times H.

    Args:
        eps: wanted mean squared gradient.
        gap: Delta = L(theta_0) - L*.
        smoothness: L.
        second_moment: V = G^2 + sigma^2.
        steps: local steps K.
        heterogeneity: mean H over the rounds.
        c: the paper's constant c (absent, so 1, in eq. 24).
        eta: step size, or None for the best.
        mode: as printed, or corrected.

    Example:
        >>> rounds_fl(eps=0.4, gap=1.0, smoothness=2.0, second_moment=3.0, steps=2, heterogeneity=0.5).value
        500.0

    Reference: OmniISR, eqs. 24 to 26.
    """
    check_mode(mode)
    eps, gap, lips = positive("eps", eps), positive("gap", gap), positive("smoothness", smoothness)
    hetero, work = real("heterogeneity", heterogeneity), positive("c", c) * real("steps", steps, low=1) ** 2
    moment = positive("second_moment", second_moment) + work * (hetero + (eps if mode == "sound" else 0.0))
    value, eta = _rounds(2 * gap, lips * moment, eta, eps)
    return answer(
        "federated rounds to eps (OmniISR, eq. 24)",
        value,
        mode=mode,
        claims=[(FL_PRINTED, lips * eta * np.sqrt(value) * work < 1)],
        terms={"eta": eta},
    )


def isr_ratio(
    *,
    kappa: Real,
    second_moment: Real,
    steps: Real,
    heterogeneity: Real,
    second_moment_plain: Real | None = None,
    smoothness_ratio: Real = 1.0,
) -> Answer:
    """Federated rounds with ISR over those without: (V + kappa K^2 H)/(V + K^2 H).

    It is kappa for V = 0, and 1 for H = 0.

    The paper's comparison gives the plain method ISR's own V and L, though ISR adds 2M loss terms to both.
    Give `second_moment_plain` and `smoothness_ratio` (L with ISR over L without) for a fair one; the ratio
    may then be above 1.

    Args:
        kappa: contraction of heterogeneity by ISR.
        second_moment: V = G^2 + sigma^2 with ISR.
        steps: local steps K.
        heterogeneity: H without ISR.
        second_moment_plain: V without ISR; None for the same.
        smoothness_ratio: L with ISR over L without.

    Example:
        >>> isr_ratio(kappa=0.5, second_moment=4.0, steps=2, heterogeneity=3.0).value
        0.625

    Reference: OmniISR, eqs. 25 to 27.
    """
    kappa, with_isr = real("kappa", kappa), real("second_moment", second_moment)
    without = with_isr if second_moment_plain is None else real("second_moment_plain", second_moment_plain)
    drift = real("steps", steps, low=1) ** 2 * real("heterogeneity", heterogeneity)
    below = without + drift
    above = positive("smoothness_ratio", smoothness_ratio) * (with_isr + kappa * drift)
    above, below = np.broadcast_arrays(above, below)
    value = np.divide(above, below, out=np.full(below.shape, np.nan), where=below > 0)
    return answer(
        "rounds with ISR over rounds without (OmniISR, eqs. 25-27)",
        value,
        claims=[("ISR needs fewer rounds", value < 1)],
        because=[(below == 0, "both second moment and heterogeneity are 0")],
    )


def rounds_hybrid(
    *,
    eps: Real,
    gap: Real,
    alpha_min: Real,
    noise: Real,
    bias: Real,
    c: Real = 1.0,
    eta: Real | None = None,
    mode: Mode = "sound",
) -> Answer:
    """Hybrid rounds by eq. 18; `inf` for eps <= C B_eff^2, the floor.

    paper: T = 4 C^2 Delta sigma_eff^2/(a_min^2 (eps - C B^2)^2)   (eq. 28; 4 C^2 stands for its O)
    sound: T = 4 C^2 Delta sigma_eff^2/(a_min (eps - C B^2)^2)
    eta given, either mode: T = (C (Delta/(a_min eta) + eta sigma_eff^2)/(eps - C B^2))^2

    The paper's a_min^2 does not follow from eq. 18: its best step is eta* = sqrt(Delta/(a_min sigma_eff^2)),
    and only one power of a_min is left.

    Args:
        eps: wanted mean squared gradient.
        gap: Delta = L(theta_0) - L*.
        alpha_min: least mixing weight a_min of the cloud.
        noise: sigma_eff^2 (`effective_noise`).
        bias: B_eff (`effective_bias`).
        c: the paper's constant C.
        eta: step size, or None for the best.
        mode: as printed, or corrected.

    Example:
        >>> rounds_hybrid(eps=0.2, gap=1.0, alpha_min=0.5, noise=1.0, bias=0.0).value
        200.0
        >>> rounds_hybrid(eps=0.2, gap=1.0, alpha_min=0.5, noise=1.0, bias=0.0, mode="paper").value
        400.0

    Reference: OmniISR, eq. 28.
    """
    check_mode(mode)
    eps, gap, share = positive("eps", eps), positive("gap", gap), real("alpha_min", alpha_min, high=1)
    noise, c = real("noise", noise), positive("c", c)
    room = eps - c * real("bias", bias) ** 2
    with np.errstate(divide="ignore", invalid="ignore"):
        initial = np.where(share > 0, c * gap / share, np.inf)
        value, step = _rounds(initial, c * noise, eta, room)
        if mode == "paper" and eta is None:
            value = value / share
        value = np.where(share > 0, value, np.inf)
    return answer(
        "hybrid rounds to eps (OmniISR, eq. 28)",
        value,
        mode=mode,
        conditions=[("alpha_min > 0", share > 0), ("eps > C B_eff^2", room > 0)],
        terms={"eta": step, "eps - C B_eff^2": room},
        because=[
            (share == 0, "alpha_min is 0, as under alternating mixing: eq. 18 then says nothing"),
            (room <= 0, "eps is at or below the bias floor C B_eff^2"),
        ],
    )


def rounds_hybrid_explicit(
    *, eps: Real, gap: Real, smoothness: Real, noise: Real, bias: Real, eta: Real | None = None
) -> Answer:
    """Hybrid rounds by `hybrid_bound_explicit`: no unknown constant, no a_min; `inf` for eps <= 3 B_eff^2.

    T = max(((4 Delta/eta + 2 L eta sigma_eff^2)/(eps - 3 B^2))^2, (4 L eta)^2)

    The second part is the step-size condition L eta <= sqrt(T)/4.

    Args:
        eps: wanted mean squared gradient.
        gap: Delta = L(theta_0) - L*.
        smoothness: L.
        noise: sigma_eff^2 (`effective_noise`, mode sound), above 0.
        bias: B_eff (`effective_bias`).
        eta: step size, or None for sqrt(2 Delta/(L sigma_eff^2)), the best where the first part decides.

    Example:
        >>> rounds_hybrid_explicit(eps=0.2, gap=1.0, smoothness=2.0, noise=1.0, bias=0.0).value
        1600.0

    Reference: after OmniISR, eq. 28.
    """
    eps, gap, lips = positive("eps", eps), positive("gap", gap), positive("smoothness", smoothness)
    room = eps - 3 * real("bias", bias) ** 2
    value, eta = _rounds(4 * gap, 2 * lips * positive("noise", noise), eta, room)
    value = np.maximum(value, (4 * lips * eta) ** 2)
    return answer(
        "hybrid rounds to eps, explicit (after OmniISR, eq. 28)",
        value,
        conditions=[("eps > 3 B_eff^2", room > 0), (HYBRID_STEP, (4 * lips * eta) ** 2 <= value)],
        terms={"eta": eta, "eps - 3 B_eff^2": room},
        because=[(room <= 0, "eps is at or below the bias floor 3 B_eff^2")],
    )
