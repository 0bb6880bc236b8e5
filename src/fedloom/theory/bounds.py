"""OmniISR's bounds: client drift in a round, and convergence of centralised and federated training.

All bound the mean squared gradient over T rounds, A = (1/T) sum_t E||grad L(theta_t)||^2, with steps of
eta_t = eta/sqrt(T). The arguments: gap Delta = L(theta_0) - L*, smoothness L, second_moment V = G^2 +
sigma^2, steps K (local steps, see `local_steps`), heterogeneity H.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fedloom.errors import UserError
from fedloom.theory.answer import Answer, Mode, Real, answer, check_mode, positive, real

CL_STEP = "L eta <= sqrt(T) (Table II)"
FL_PRINTED = "L eta sqrt(T) c K^2 < 1 (as printed in Theorem 3)"
FL_SOLVED = "L eta c K^2 / sqrt(T) < 1"
HYBRID_STEP = "L eta <= sqrt(T)/4 (Table II)"
TELLING = "says more than min_t ||grad||^2 <= 2 L gap, true of any L-smooth loss"


def drift_bound(
    *,
    eta_t: Real,
    steps: Real,
    grad_sq: Real,
    heterogeneity: Real,
    noise: Real,
    c: Real = 1.0,
    smoothness: Real | None = None,
    mode: Mode = "paper",
) -> Answer:
    """Client drift in a round: sum_n w_n E||delta_n||^2 <= C eta_t^2 K^2 (||grad||^2 + H + sigma^2).

    paper: C is "an absolute constant" (here `c`)
    sound: C = 2 (((1 + x/K)^K - 1)/x)^2 with x = L eta_t K, so C -> 2 for small steps and C < 6 for x <= 1

    The paper's form is wrong: no absolute constant serves every step size, since K steps on (L/2) theta^2
    multiply theta by (1 - eta_t L)^K, which grows without limit once eta_t L > 2. The sound form holds for
    every step size. Its proof: in the L2 norm r_e of theta_e - theta_0, a local step gives
    r_{e+1} <= (1 + L eta_t) r_e + eta_t (||grad_n|| + sigma), and sum_n w_n ||grad_n||^2 = ||grad||^2 + H.

    Args:
        eta_t: local step size in that round.
        steps: local steps K.
        grad_sq: squared norm of the global gradient at the start of the round.
        heterogeneity: H at the start of the round (eq. 13).
        noise: variance sigma^2 of a stochastic gradient.
        c: the paper's constant C (mode paper).
        smoothness: L of every client's loss (mode sound).
        mode: as printed, or corrected.

    Example:
        >>> drift_bound(eta_t=0.1, steps=2, grad_sq=1.0, heterogeneity=1.0, noise=1.0).value
        0.12

    Reference: OmniISR, Lemma 2, eq. 14.
    """
    check_mode(mode)
    eta_t, steps, c = positive("eta_t", eta_t), real("steps", steps, low=1), positive("c", c)
    total = real("grad_sq", grad_sq) + real("heterogeneity", heterogeneity) + real("noise", noise)
    terms: dict[str, Any] = {}
    if smoothness is not None:
        reach = positive("smoothness", smoothness) * eta_t * steps
        terms["L eta_t K"] = reach
    if mode == "sound":
        if smoothness is None:
            raise UserError("smoothness is missing: mode 'sound' derives the constant C from it. Give L.")
        c = drift_constant(reach, steps)
    value = np.where(total > 0, c, 1.0) * eta_t**2 * steps**2 * total
    return answer(
        "drift bound (OmniISR, eq. 14)",
        value,
        mode=mode,
        terms={"C": c, **terms},
        because=[(np.isinf(value), "the step is so large that (1 + L eta_t)^K is beyond any number")],
    )


def drift_constant(reach: Any, steps: Any) -> Any:
    """C(x) = 2 (((1 + x/K)^K - 1)/x)^2 for x = L eta_t K: the drift grows by 1 + L eta_t a step."""
    with np.errstate(over="ignore"):
        return 2 * (np.expm1(steps * np.log1p(reach / steps)) / reach) ** 2


def cl_bound(*, gap: Real, eta: Real, rounds: Real, smoothness: Real, second_moment: Real) -> Answer:
    """Centralised bound A <= 2 Delta/(eta sqrt T) + L eta V/sqrt T.

    Right as printed once L and V are (see `smoothness` and `squared_bound`); twice what the proof needs.

    Args:
        gap: Delta = L(theta_0) - L*.
        eta: step size; the steps made are eta/sqrt(T).
        rounds: T.
        smoothness: L.
        second_moment: V = G^2 + sigma^2.

    Example:
        >>> cl_bound(gap=1.0, eta=1.0, rounds=100, smoothness=2.0, second_moment=3.0).value
        0.8

    Reference: OmniISR, Theorem 1, eq. 10.
    """
    gap, eta, root, lips = problem(gap, eta, rounds, smoothness)
    initial, variance = 2 * gap / (eta * root), lips * eta * real("second_moment", second_moment) / root
    value = initial + variance
    return answer(
        "centralised bound (OmniISR, eq. 10)",
        value,
        conditions=[(CL_STEP, lips * eta <= root)],
        claims=[(TELLING, value < 2 * lips * gap)],
        terms={"initial gap": initial, "variance": variance},
    )


def cl_best_step(*, gap: Real, smoothness: Real, second_moment: Real, rounds: Real = 1.0) -> Answer:
    """The step size eta* = sqrt(2 Delta/(L V)) that makes the centralised bound least: 2 sqrt(2 Delta L V/T).

    Args:
        gap: Delta = L(theta_0) - L*.
        smoothness: L.
        second_moment: V = G^2 + sigma^2.
        rounds: T, for the bound at eta* given in `terms`.

    Example:
        >>> best = cl_best_step(gap=3.0, smoothness=2.0, second_moment=3.0, rounds=144)
        >>> best.value, best.terms["bound at eta*"]
        (1.0, 1.0)

    Reference: OmniISR, Theorem 1, eq. 10 (minimised).
    """
    gap, lips = positive("gap", gap), positive("smoothness", smoothness)
    moment, root = positive("second_moment", second_moment), np.sqrt(real("rounds", rounds, low=1))
    eta = np.sqrt(2 * gap / (lips * moment))
    return answer(
        "best step eta* of the centralised bound (OmniISR, eq. 10)",
        eta,
        conditions=[(CL_STEP, lips * eta <= root)],
        terms={"bound at eta*": 2 * np.sqrt(2 * gap * lips * moment) / root},
    )


def fl_bound(
    *,
    gap: Real,
    eta: Real,
    rounds: Real,
    smoothness: Real,
    second_moment: Real,
    steps: Real,
    heterogeneity: Real,
    c: Real = 1.0,
    mode: Mode = "sound",
) -> Answer:
    """Federated bound, solved for A, which the printed form has on both sides.

    A <= (2 Delta/(eta sqrt T) + L eta (V + c K^2 H)/sqrt T) / (1 - q),  q = L eta c K^2/sqrt T

    paper: `inf` unless L eta sqrt(T) c K^2 < 1, the printed condition
    sound: `inf` unless q < 1, the condition that solving for A needs

    The printed condition is wrong, and fatal: it forces eta < 1/(L sqrt(T) c K^2), so that the first term
    alone is above 2 Delta L c K^2 for *every* T. Under it more rounds do not help, and with c K^2 >= 1 the
    bound never says more than ||grad L(theta_0)||^2 <= 2 L Delta does before any training.

    Args:
        gap: Delta = L(theta_0) - L*.
        eta: step size; the local steps made are eta/sqrt(T).
        rounds: T.
        smoothness: L.
        second_moment: V = G^2 + sigma^2.
        steps: local steps K.
        heterogeneity: mean H over the rounds.
        c: the paper's constant c.
        mode: which condition decides.

    Example:
        >>> a = fl_bound(
        ...     gap=1.0, eta=1.0, rounds=100, smoothness=2.0, second_moment=3.0, steps=1, heterogeneity=1.0)
        >>> round(a.value, 6)
        1.25

    Reference: OmniISR, Theorem 3, eq. 15.
    """
    check_mode(mode)
    gap, eta, root, lips = problem(gap, eta, rounds, smoothness)
    moment, hetero = real("second_moment", second_moment), real("heterogeneity", heterogeneity)
    work = positive("c", c) * real("steps", steps, low=1) ** 2
    share = lips * eta * work / root
    initial, variance = 2 * gap / (eta * root), lips * eta * moment / root
    drift = share * hetero
    printed, solved = share * root**2 < 1, share < 1
    finite = printed & solved if mode == "paper" else solved
    value = np.where(finite, (initial + variance + drift) / np.where(solved, 1 - share, 1.0), np.inf)
    needs = [(FL_PRINTED, printed), (FL_SOLVED, solved)]
    return answer(
        "federated bound (OmniISR, eq. 15, solved)",
        value,
        mode=mode,
        conditions=needs if mode == "paper" else needs[1:],
        claims=[*([] if mode == "paper" else needs[:1]), (TELLING, value < 2 * lips * gap)],
        terms={"initial gap": initial, "variance": variance, "drift": drift, "1 - q": 1 - share},
        because=[(~finite, f"{FL_PRINTED if mode == 'paper' else FL_SOLVED} fails")],
    )


def fl_bound_explicit(
    *, gap: Real, eta: Real, rounds: Real, smoothness: Real, noise: Real, steps: Real, heterogeneity: Real
) -> Answer:
    """Federated bound with every constant known (ours, in place of Theorem 3's unspecified c).

    A <= (2 Delta/(K eta sqrt T) + q (H + sigma^2)) / (1 - q),  x = L eta K/sqrt T,  q = C(x) (x + x^2/3)

    with C(x) of `drift_bound`, mode sound. Proof: the descent lemma over a round; the gradients along the
    local path differ from those at its start by at most L times the drift, and sum_{e<K} e^2 <= K^3/3. It
    needs neither bounded gradients nor an unknown constant; L is the smoothness of every client's loss.

    Args:
        gap: Delta = L(theta_0) - L*.
        eta: step size; the local steps made are eta/sqrt(T).
        rounds: T.
        smoothness: L of every client's loss.
        noise: variance sigma^2 of a stochastic gradient.
        steps: local steps K.
        heterogeneity: mean H over the rounds.

    Example:
        >>> a = fl_bound_explicit(
        ...     gap=1.0, eta=0.1, rounds=10**4, smoothness=1.0, noise=1.0, steps=5, heterogeneity=1.0)
        >>> round(a.value, 4)
        0.0607

    Reference: after OmniISR, Theorem 3.
    """
    gap, eta, root, lips = problem(gap, eta, rounds, smoothness)
    steps = real("steps", steps, low=1)
    spread = real("noise", noise) + real("heterogeneity", heterogeneity)
    reach = lips * eta * steps / root
    share = drift_constant(reach, steps) * (reach + reach**2 / 3)
    solved = share < 1
    usable = np.where(solved, share, 0.0)
    initial = 2 * gap / (steps * eta * root)
    value = np.where(solved, (initial + usable * spread) / (1 - usable), np.inf)
    return answer(
        "federated bound, explicit (after OmniISR, Theorem 3)",
        value,
        conditions=[("C(x) (x + x^2/3) < 1 with x = L eta K/sqrt(T)", solved)],
        claims=[(TELLING, value < 2 * lips * gap)],
        terms={"initial gap": initial, "drift and noise": usable * spread, "1 - q": 1 - share},
        because=[(~solved, "the step size eta is too large for K local steps: C(x) (x + x^2/3) >= 1")],
    )


def problem(gap: Any, eta: Any, rounds: Any, smoothness: Any) -> tuple[Any, Any, Any, Any]:
    """Delta, eta, sqrt(T) and L, checked."""
    return (
        real("gap", gap),
        positive("eta", eta),
        np.sqrt(real("rounds", rounds, low=1)),
        positive("smoothness", smoothness),
    )
