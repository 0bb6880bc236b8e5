"""Hybrid training in OmniISR: effective bias and noise, and the bound with them."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedloom.errors import UserError
from fedloom.theory.answer import Answer, Mode, Real, Vector, answer, check_mode, positive, real
from fedloom.theory.bounds import HYBRID_STEP, TELLING, problem


def effective_bias(*, alphas: Vector, cloud: Any, federated: Any) -> Answer:
    """Effective bias B_eff = max_t ||a_t b_c + (1 - a_t) b_f||.

    Args:
        alphas: the mixing weights a_t over the rounds, each in [0, 1].
        cloud: bias vector b_c of the cloud gradient, or one row a round.
        federated: bias vector b_f of the federated gradient, or one row a round.

    Example:
        >>> effective_bias(alphas=(0.5, 1.0), cloud=(1.0, 0.0), federated=(-1.0, 0.0)).value
        1.0

    Reference: OmniISR, eq. 16.
    """
    alphas = np.atleast_1d(real("alphas", alphas, high=1))[:, None]
    cloud = np.atleast_2d(real("cloud", cloud, low=-np.inf))
    federated = np.atleast_2d(real("federated", federated, low=-np.inf))
    if cloud.shape[1] != federated.shape[1] or {len(cloud), len(federated)} - {1, len(alphas)}:
        raise UserError(
            f"biases of shape {cloud.shape} and {federated.shape} do not fit {len(alphas)} mixing weights. "
            "Give two vectors of one length, or two tables with a row for each weight."
        )
    norms = np.linalg.norm(alphas * cloud + (1 - alphas) * federated, axis=1)
    return answer("effective bias B_eff (OmniISR, eq. 16)", norms.max())


def effective_noise(*, alphas: Vector, cloud: float, federated: float, mode: Mode = "sound") -> Answer:
    """Effective noise sigma_eff^2 of the mixed gradient, for independent noises s_c^2 and s_f^2.

    paper: a_min^2 s_c^2 + (1 - a_min)^2 s_f^2 with a_min = min_t a_t
    sound: max_t of a_t^2 s_c^2 + (1 - a_t)^2 s_f^2, reached at the smallest or the largest a_t

    The paper's form is wrong: a_min does not bound the variance over the rounds (a_t = 0.2, 0.8 with s_f^2 =
    0 gives 0.04 s_c^2 for a true maximum of 0.64 s_c^2). Its claim that mixing enlarges the noise is false
    as well: the value is at most max(s_c^2, s_f^2), and half of either for a = 1/2 and equal noises.

    Args:
        alphas: the mixing weights a_t over the rounds, each in [0, 1].
        cloud: variance s_c^2 of the cloud gradient.
        federated: variance s_f^2 of the federated gradient.
        mode: as printed, or corrected.

    Example:
        >>> effective_noise(alphas=(0.5,), cloud=2.0, federated=2.0).value
        1.0

    Reference: OmniISR, eq. 17.
    """
    check_mode(mode)
    mix = np.atleast_1d(real("alphas", alphas, high=1))
    cloud, federated = real("cloud", cloud), real("federated", federated)
    if mode == "paper":
        mix = mix.min(keepdims=True)
    value = (mix**2 * cloud + (1 - mix) ** 2 * federated).max()
    largest = max(cloud, federated)
    return answer(
        "effective noise sigma_eff^2 (OmniISR, eq. 17)",
        value,
        mode=mode,
        claims=[("mixing enlarges the noise beyond both sources (after Theorem 6)", value > largest)],
        terms={"larger of the two noises": largest},
    )


def hybrid_bound(
    *,
    gap: Real,
    eta: Real,
    rounds: Real,
    smoothness: Real,
    alpha_min: Real,
    noise: Real,
    bias: Real,
    c: Real = 1.0,
) -> Answer:
    """Hybrid bound A <= C Delta/(a_min eta sqrt T) + C eta sigma_eff^2/sqrt T + C B_eff^2.

    Infinite for a_min = 0, hence for the paper's own alternating schedule (1, 0, 1, 0, ...). That is the
    paper's form, not a fact: see `hybrid_bound_explicit`, which needs no a_min.

    Args:
        gap: Delta = L(theta_0) - L*.
        eta: step size; the steps made are eta/sqrt(T).
        rounds: T.
        smoothness: L, for the step-size condition only.
        alpha_min: least mixing weight a_min of the cloud.
        noise: sigma_eff^2 (`effective_noise`).
        bias: B_eff (`effective_bias`).
        c: the paper's constant C.

    Example:
        >>> hybrid_bound(
        ...     gap=1.0, eta=1.0, rounds=100, smoothness=2.0, alpha_min=0.5, noise=1.0, bias=0.1).value
        0.31

    Reference: OmniISR, Theorem 4, eq. 18.
    """
    gap, eta, root, lips = problem(gap, eta, rounds, smoothness)
    share, c = real("alpha_min", alpha_min, high=1), positive("c", c)
    with np.errstate(divide="ignore", invalid="ignore"):
        initial = np.where(share > 0, c * gap / (share * eta * root), np.inf)
    variance, floor = c * eta * real("noise", noise) / root, c * real("bias", bias) ** 2
    value = initial + variance + floor
    return answer(
        "hybrid bound (OmniISR, eq. 18)",
        value,
        conditions=[("alpha_min > 0", share > 0), (HYBRID_STEP, lips * eta <= root / 4)],
        claims=[(TELLING, value < 2 * lips * gap)],
        terms={"initial gap": initial, "variance": variance, "bias floor": floor},
        because=[(share == 0, "alpha_min is 0, as under alternating mixing: Theorem 4 then says nothing")],
    )


def hybrid_bound_explicit(*, gap: Real, eta: Real, rounds: Real, smoothness: Real, noise: Real, bias: Real) -> Answer:
    """Hybrid bound with every constant known (ours).

    A <= 4 Delta/(eta sqrt T) + 2 L eta sigma_eff^2/sqrt T + 3 B_eff^2

    Valid for L eta <= sqrt(T)/4, the paper's own condition. Proof: -<grad, grad + b> <= -||grad||^2/2 +
    B^2/2 and E||g||^2 <= 2 ||grad||^2 + 2 B^2 + sigma_eff^2 in the descent lemma. Both sources estimate the
    same gradient up to their bias, so no a_min enters: alternating mixing converges too, to the same kind of
    floor.

    Args:
        gap: Delta = L(theta_0) - L*.
        eta: step size; the steps made are eta/sqrt(T).
        rounds: T.
        smoothness: L.
        noise: sigma_eff^2 (`effective_noise`, mode sound).
        bias: B_eff (`effective_bias`).

    Example:
        >>> hybrid_bound_explicit(gap=1.0, eta=1.0, rounds=100, smoothness=2.0, noise=1.0, bias=0.1).value
        0.83

    Reference: after OmniISR, Theorem 4.
    """
    gap, eta, root, lips = problem(gap, eta, rounds, smoothness)
    initial = 4 * gap / (eta * root)
    variance, floor = 2 * lips * eta * real("noise", noise) / root, 3 * real("bias", bias) ** 2
    holds = lips * eta <= root / 4
    value = np.where(holds, initial + variance + floor, np.inf)
    return answer(
        "hybrid bound, explicit (after OmniISR, Theorem 4)",
        value,
        conditions=[(HYBRID_STEP, holds)],
        claims=[(TELLING, value < 2 * lips * gap)],
        terms={"initial gap": initial, "variance": variance, "bias floor": floor},
        because=[(~holds, f"{HYBRID_STEP} fails")],
    )
