"""FedAIMS, Theorem 1: the step size it allows, its bound, and the rounds to eps."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedloom.errors import UserError
from fedloom.theory.answer import Answer, Mode, Real, answer, check_mode, positive, real

STEP = "eta < 2/L"


def aims_step_limit(*, eps: Real, kappa_sq: Real, smoothness: Real, noise: Real, steps: Real) -> Answer:
    """The largest step size of Theorem 1: eta_max = min(2 (eps - kappa^2)/(L (eps + K sigma^2)), 2/L).

    Defined only for eps > kappa^2: below that floor the theorem promises nothing, though it speaks of "an
    arbitrary constant eps". The second part of the minimum is never the smaller one.

    Args:
        eps: wanted mean over the rounds of the squared gradients summed over a round's steps.
        kappa_sq: kappa^2, bound on ||phi^{t+1} - phi_i^t||^2 (Assumption 4).
        smoothness: L.
        noise: variance sigma^2 of a stochastic gradient.
        steps: local steps K (the paper's E).

    Example:
        >>> round(aims_step_limit(eps=1.0, kappa_sq=0.5, smoothness=2.0, noise=0.2, steps=5).value, 12)
        0.25

    Reference: FedAIMS, Theorem 1, eq. 27.
    """
    eps, kappa_sq, lips = positive("eps", eps), real("kappa_sq", kappa_sq), positive("smoothness", smoothness)
    spread = real("steps", steps, low=1) * real("noise", noise)
    room = eps - kappa_sq
    value = np.where(room > 0, np.minimum(2 * room / (lips * (eps + spread)), 2 / lips), np.nan)
    return answer(
        "largest step size eta_max (FedAIMS, Theorem 1)",
        value,
        conditions=[("eps > kappa^2", room > 0)],
        because=[(room <= 0, "eps is at or below kappa^2, a floor that no step size gets under")],
    )


def aims_bound(
    *,
    gap: Real,
    eta: Real,
    rounds: Real,
    smoothness: Real,
    noise: Real,
    steps: Real,
    kappa_sq: Real,
    gradient: Real | None = None,
    mode: Mode = "paper",
) -> Answer:
    """Theorem 1's bound on the mean over rounds of sum_e (lambda ||grad F||^2 + (1 - lambda) ||grad A||^2).

    (Delta/T + L K eta^2 sigma^2/2 + jump) / (eta - L eta^2/2)

    paper: jump = eta kappa^2
    sound: jump = G kappa + L kappa^2/2

    The paper's form is wrong in two places. Delta is printed as final minus initial loss, which is negative:
    it is the initial minus the final one. And by smoothness the jump of the loss when the aggregated
    backbone replaces the client's, a move of length kappa, is up to G kappa + L kappa^2/2 with G the
    gradient's norm there; nothing turns it into eta kappa^2. With the sound jump the floor grows as eta
    falls: the theorem then shows no convergence to an arbitrary eps.

    Args:
        gap: Delta, initial minus final loss.
        eta: step size.
        rounds: T.
        smoothness: L.
        noise: variance sigma^2 of a stochastic gradient.
        steps: local steps K (the paper's E).
        kappa_sq: kappa^2, bound on ||phi^{t+1} - phi_i^t||^2.
        gradient: G, bound on the gradient's norm (mode sound).
        mode: as printed, or corrected.

    Example:
        >>> aims_bound(gap=1.0, eta=0.5, rounds=4, smoothness=2.0, noise=1.0, steps=1, kappa_sq=0.5).value
        3.0

    Reference: FedAIMS, Theorem 1, eqs. 13 and 26.
    """
    gap, rounds = real("gap", gap), real("rounds", rounds, low=1)
    eta, lips, noisy, jump, gain = _parts(eta, smoothness, noise, steps, kappa_sq, gradient, mode)
    usable = gain > 0
    safe = np.where(usable, gain, 1.0)
    value = np.where(usable, (gap / rounds + noisy + jump) / safe, np.inf)
    return answer(
        "bound of FedAIMS, Theorem 1 (eq. 13)",
        value,
        mode=mode,
        conditions=[(STEP, eta < 2 / lips)],
        terms={
            "initial gap": np.where(usable, gap / rounds / safe, np.inf),
            "floor": np.where(usable, (noisy + jump) / safe, np.inf),
        },
        because=[(~usable, f"{STEP} fails")],
    )


def aims_rounds(
    *,
    eps: Real,
    gap: Real,
    eta: Real,
    smoothness: Real,
    noise: Real,
    steps: Real,
    kappa_sq: Real,
    gradient: Real | None = None,
    mode: Mode = "paper",
) -> Answer:
    """Rounds after which Theorem 1's bound is below eps.

    T > Delta/(eps (eta - L eta^2/2) - L K eta^2 sigma^2/2 - jump)

    The jump is as in `aims_bound`; `inf` when the denominator is not positive (always for eps <= kappa^2 in
    mode paper).

    Args:
        eps: wanted mean over the rounds of the squared gradients summed over a round's steps.
        gap: Delta, initial minus final loss.
        eta: step size.
        smoothness: L.
        noise: variance sigma^2 of a stochastic gradient.
        steps: local steps K (the paper's E).
        kappa_sq: kappa^2, bound on ||phi^{t+1} - phi_i^t||^2.
        gradient: G, bound on the gradient's norm (mode sound).
        mode: as printed, or corrected.

    Example:
        >>> aims_rounds(eps=3.0, gap=1.0, eta=0.5, smoothness=2.0, noise=1.0, steps=1, kappa_sq=0.5).value
        4.0

    Reference: FedAIMS, Theorem 1, eqs. 13 and 27.
    """
    eps, gap = positive("eps", eps), positive("gap", gap)
    eta, lips, noisy, jump, gain = _parts(eta, smoothness, noise, steps, kappa_sq, gradient, mode)
    room = eps * gain - noisy - jump
    reached = (room > 0) & (gain > 0)
    value = np.where(reached, gap / np.where(reached, room, 1.0), np.inf)
    return answer(
        "rounds to eps (FedAIMS, Theorem 1)",
        value,
        mode=mode,
        conditions=[(STEP, eta < 2 / lips), ("eps is above the floor of the bound", room > 0)],
        terms={"floor": np.where(gain > 0, (noisy + jump) / np.where(gain > 0, gain, 1.0), np.inf)},
        because=[
            (gain <= 0, f"{STEP} fails"),
            ((gain > 0) & (room <= 0), "eps is at or below the floor that noise and aggregation leave"),
        ],
    )


def _parts(
    eta: Any, smoothness: Any, noise: Any, steps: Any, kappa_sq: Any, gradient: Any, mode: Mode
) -> tuple[Any, Any, Any, Any, Any]:
    """Step, smoothness, noise term, jump at aggregation, and the factor of the squared gradients."""
    check_mode(mode)
    eta, lips, kappa_sq = positive("eta", eta), positive("smoothness", smoothness), real("kappa_sq", kappa_sq)
    noisy = lips * real("steps", steps, low=1) * eta**2 * real("noise", noise) / 2
    if mode == "paper":
        jump = eta * kappa_sq
    elif gradient is None:
        raise UserError("gradient is missing: mode 'sound' needs G, a bound on the gradient's norm. Give it.")
    else:
        jump = real("gradient", gradient) * np.sqrt(kappa_sq) + lips * kappa_sq / 2
    return eta, lips, noisy, jump, eta - lips * eta**2 / 2
