"""FedMAP's theory: how convex its learnable prior is (Lemma 1), and its rounds on quadratics."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedloom.errors import UserError
from fedloom.theory.answer import Answer, Mode, Real, Vector, answer, check_mode, positive, real


def map_hessian(distance: Any, s: Any, *, eps: float, c: float = 1.0, mode: Mode = "sound") -> Any:
    """Hessian in (theta, mu, s) of a coordinate's R = (theta - mu)^2/(2 (s + c)) + eps (s^2 + mu^2).

    With a = 1/(s + c) and d = theta - mu its quadratic form is a sum of squares,

    a (x - y - a d z)^2 + 2 eps (y^2 + z^2).

    paper: the printed entries: twice the first square, half the second (another R, without its 1/2).

    The result has shape (..., 3, 3).

    Reference: FedMAP, appendix A.2, proof of Lemma 1.
    """
    check_mode(mode)
    distance, s = np.broadcast_arrays(real("distance", distance, low=-np.inf), real("s", s, low=-c, open_low=True))
    eps, a = positive("eps", eps), 1 / (s + c)
    scale, ridge = (2.0, eps) if mode == "paper" else (1.0, 2 * eps)
    row = np.stack([np.ones_like(a), -np.ones_like(a), -a * distance], axis=-1)
    square = scale * a[..., None, None] * row[..., :, None] * row[..., None, :]
    return square + ridge * np.diag([0.0, 1.0, 1.0])


def _least_curvature(distance: Any, s: Any, *, eps: float, c: float, mode: Mode = "sound") -> Any:
    """Smallest eigenvalue of `map_hessian`, as 1 over the largest of its inverse.

    Far out the Hessian's eigenvalues differ by more than float64 holds, so that its smallest one would be
    noise. The inverse has a closed form: x = t + y + a d z turns the quadratic form into
    a t^2 + r (y^2 + z^2).
    """
    check_mode(mode)
    tilt = real("distance", distance, low=-np.inf) / (real("s", s, low=-c, open_low=True) + c)
    width = np.broadcast_to(real("s", s, low=-c, open_low=True) + c, tilt.shape)
    scale, ridge = (2.0, eps) if mode == "paper" else (1.0, 2 * eps)
    rows = np.zeros((*tilt.shape, 3, 3))
    rows[..., 0, 0] = width / scale + (1 + tilt**2) / ridge
    rows[..., 1, 1] = rows[..., 2, 2] = rows[..., 0, 1] = rows[..., 1, 0] = 1 / ridge
    rows[..., 0, 2] = rows[..., 2, 0] = tilt / ridge
    return 1 / np.linalg.eigvalsh(rows)[..., -1]


def map_curvature(*, distance: Real, s: Real = 0.0, eps: float = 1e-4, c: float = 1.0, mode: Mode = "sound") -> Answer:
    """Least curvature of the learnable prior at a point: the smallest eigenvalue of `map_hessian`.

    Positive everywhere, and at most 2 eps/(2 + d^2/(s + c)^2), which tends to 0 as |d| = |theta - mu| grows.
    So Lemma 1 is wrong: R is strictly convex, but *strongly* convex only on bounded sets, not on R^d x R^d x
    I^d. (Its proof shows that the determinant, 4 eps^2/(s + c), stays away from 0, which does not keep the
    smallest eigenvalue away; the third minor is also printed with (theta - mu) for (theta - mu)^2.)

    Args:
        distance: d = theta - mu.
        s: variance parameter, above -c.
        eps: weight of ||s||^2 + ||mu||^2.
        c: shift in alpha(s) = 1/(s + c).
        mode: the Hessian as printed, or corrected.

    Example:
        >>> map_curvature(distance=0.0, eps=0.5).value < 2 * 0.5 / 2
        True

    Reference: FedMAP, Lemma 1.
    """
    eps = float(positive("eps", eps))
    value = _least_curvature(distance, s, eps=eps, c=c, mode=mode)
    tilt = np.asarray(distance) / (np.asarray(s) + c)
    ridge = eps if mode == "paper" else 2 * eps
    return answer(
        "least curvature of the learnable prior (FedMAP, Lemma 1)",
        value,
        mode=mode,
        conditions=[("strictly convex here", value > 0)],
        terms={"upper bound": ridge / (2 + tilt**2)},
    )


def map_convex_on_box(
    *, distance: float, s_low: float, s_high: float, eps: float = 1e-4, c: float = 1.0, points: int = 101
) -> Answer:
    """Least curvature of the learnable prior on a grid over |theta - mu| <= distance, s_low <= s <= s_high.

    `claims` tries the lemma's uniform bound: it would have to survive a box a thousand times as long.

    Args:
        distance: half-length of the box in theta - mu.
        s_low: least s, above -c.
        s_high: largest s.
        eps: weight of ||s||^2 + ||mu||^2.
        c: shift in alpha(s) = 1/(s + c).
        points: grid points along each side.

    Example:
        >>> map_convex_on_box(distance=10.0, s_low=-0.5, s_high=5.0).valid
        True

    Reference: FedMAP, Lemma 1.
    """
    distance = float(positive("distance", distance))
    s_low = float(real("s_low", s_low, low=-c, open_low=True))
    s_high = float(real("s_high", s_high, low=s_low))
    eps = float(positive("eps", eps))
    if points < 2:
        raise UserError(f"points = {points} makes no grid: expected at least 2. Give a larger number.")
    d, s = np.meshgrid(np.linspace(0, distance, points), np.linspace(s_low, s_high, points))
    curvature = _least_curvature(d, s, eps=eps, c=c)
    where = np.unravel_index(curvature.argmin(), curvature.shape)
    far = _least_curvature(1000 * distance, s[:, 0], eps=eps, c=c).min()
    return answer(
        "least curvature of the learnable prior on a box (FedMAP, Lemma 1)",
        curvature.min(),
        conditions=[("strictly convex on the box", curvature.min() > 0)],
        claims=[("uniformly strongly convex: no less on a far longer box", far >= 0.5 * curvature.min())],
        terms={"at |theta - mu|": d[where], "at s": s[where], "on a box 1000 times as long": far},
    )


def map_update(*, curvature: Real, centre: Real, gamma: Real, sigma2: Real) -> Answer:
    """The local MAP model on f = (a/2)(theta - b)^2: theta* = (a b + gamma/sigma^2)/(a + 1/sigma^2).

    sigma^2 = inf gives the local minimiser b; sigma^2 -> 0 gives gamma, so that nothing moves: it does *not*
    approach FedAvg, though the paper says so.

    Args:
        curvature: a.
        centre: b.
        gamma: the prior's mean.
        sigma2: the prior's variance, inf for no prior.

    Example:
        >>> map_update(curvature=1.0, centre=4.0, gamma=0.0, sigma2=1.0).value
        2.0

    Reference: FedMAP, eq. 7 (solved); section 4.2.
    """
    a, b, g, pull = _quadratic(curvature, centre, gamma, sigma2)
    free = a + pull == 0
    value = np.where(free, np.nan, (a * b + pull * g) / np.where(free, 1.0, a + pull))
    return answer(
        "local MAP model on a quadratic (FedMAP, eq. 7)",
        value,
        conditions=[("a + 1/sigma^2 > 0", ~free)],
        because=[(free, "neither the loss nor the prior has curvature: every theta is a minimiser")],
    )


def map_round(*, curvatures: Vector, centres: Vector, weights: Vector, gamma: float, sigma2: float) -> Answer:
    """A round of FedMAP on f_k = (a_k/2)(theta - b_k)^2, weights fixed: gamma' = sum_k w_k theta_k*(gamma).

    M(gamma) = sum_k w_k (a_k/(1 + a_k sigma^2)) (gamma - b_k)^2/2
    gamma* = sum_k w_k p_k b_k/sum_k w_k p_k,  p_k = a_k/(a_k + 1/sigma^2)

    The round is a gradient step of length sigma^2 on M. It shrinks the distance to gamma* by the factor
    1 - sum_k w_k p_k, and so stands still as sigma -> 0. Theorem 1 asks for R jointly *strictly* convex,
    which ||theta - gamma||^2 is not (it is constant along theta = gamma): the result here rests on the
    losses' curvature.

    Args:
        curvatures: a_k of each client.
        centres: b_k of each client.
        weights: w_k; scaled to sum 1.
        gamma: the prior's mean before the round.
        sigma2: the prior's variance, finite.

    Example:
        >>> r = map_round(curvatures=(1, 1), centres=(0, 4), weights=(1, 3), gamma=0.0, sigma2=1.0)
        >>> r.value, r.terms["gamma*"], r.terms["contraction"]
        (1.5, 3.0, 0.5)

    Reference: FedMAP, Theorem 1, eqs. 2 to 4.
    """
    weights = np.atleast_1d(real("weights", weights))
    a, b, g, pull = _quadratic(np.atleast_1d(curvatures), np.atleast_1d(centres), gamma, sigma2)
    fits = a.shape == b.shape == weights.shape
    if not fits or pull == 0 or np.all(a * weights == 0):
        raise UserError(
            f"{a.size} curvatures, {b.size} centres, {weights.size} weights, sigma2 = {sigma2:g} do not fit. "
            "Give as many of each, a positive weight with a positive curvature, and a finite sigma2."
        )
    weights = weights / weights.sum()
    share = weights * a / (a + pull)
    envelope = weights @ (a / (1 + a / pull) * (g - b) ** 2) / 2
    return answer(
        "prior's mean after a round on quadratics (FedMAP, Theorem 1)",
        weights @ ((a * b + pull * g) / (a + pull)),
        conditions=[("the envelope M is strictly convex", share.sum() > 0)],
        terms={"gamma*": share @ b / share.sum(), "contraction": 1 - share.sum(), "M(gamma)": envelope},
    )


def _quadratic(curvature: Any, centre: Any, gamma: Any, sigma2: Any) -> tuple[Any, Any, Any, Any]:
    return (
        real("curvature", curvature),
        real("centre", centre, low=-np.inf),
        real("gamma", gamma, low=-np.inf),
        1 / real("sigma2", sigma2, open_low=True, endless=True),
    )
