"""The time to leave a strict saddle: OmniISR's eq. 21, its best step size and its trends; Fig. 6's round.

No constant of Fig. 7 is published. The defaults here are ours.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fedloom.errors import UserError
from fedloom.theory.answer import Answer, Condition, Mode, Real, Vector, answer, check_mode, positive, real


def _head(eta: Any, gamma: Any, delta: Any, start: Any, bias: Any, noise: Any, mode: Mode) -> Any:
    """What is left of y0 after bias and noise have pushed back: the denominator of eq. 21."""
    push = eta * bias / gamma if mode == "paper" else bias / gamma
    return start - push - noise * np.sqrt(eta / gamma) * np.sqrt(np.log(2 / delta))


def escape_time(
    *,
    eta: Real,
    gamma: Real,
    radius: Real = 10.0,
    delta: Real = 0.1,
    start: Real = 1.0,
    bias: Real = 0.05,
    noise: Real = 0.1,
    c0: Real = 1.0,
    mode: Mode = "paper",
) -> Answer:
    """Steps to leave a ball of radius R round a saddle of curvature -gamma, with probability 1 - delta.

    paper: T = ln(C0 R/d)/(eta gamma),    d = y0 - eta B/gamma - sigma sqrt(eta/gamma) sqrt(ln(2/delta))
    sound: T = ln(C0 R/d)/ln(1 + eta gamma),  d = y0 - B/gamma - sigma sqrt(eta/gamma) sqrt(ln(2/delta))

    The paper's form is wrong twice. Unrolling y <- (1 + eta gamma) y - eta (B + noise) sums a geometric
    series, whose bias part is eta B/(eta gamma) = B/gamma, without eta; and a step multiplies y by 1 + eta
    gamma, not by exp(eta gamma). (B = 0.5, gamma = 1, eta = 0.1, sigma = 0, R = 10 leaves after 31 steps;
    eq. 21 says 24.) C0 = 1 serves a saddle that is exactly quadratic. Either form needs sub-Gaussian noise,
    where Assumption 4 bounds the variance only.

    In both forms T *rises* with B and with sigma: the claim that noise speeds the escape up is not what eq.
    21 says. `nan` where d <= 0 (no bound: small gamma, large eta or small delta) or C0 R <= d (outside
    already). So "O(log(R/delta)/(eta gamma))" is false too: `terms` holds the delta below which there is no
    bound at all.

    Args:
        eta: step size.
        gamma: size of the negative curvature.
        radius: R.
        delta: probability of failure, in (0, 1].
        start: displacement y0 along the escaping direction.
        bias: B_eff.
        noise: sigma_eff, a standard deviation.
        c0: the paper's constant C0.
        mode: as printed, or corrected.

    Example:
        >>> round(escape_time(eta=0.1, gamma=0.1).value, 1)
        255.5

    Reference: OmniISR, Theorem 6, eq. 21.
    """
    check_mode(mode)
    eta, gamma, radius = positive("eta", eta), positive("gamma", gamma), positive("radius", radius)
    delta, start = real("delta", delta, high=1, open_low=True), positive("start", start)
    bias, noise, c0 = real("bias", bias), real("noise", noise), positive("c0", c0)
    head = _head(eta, gamma, delta, start, bias, noise, mode)
    head, far = np.broadcast_arrays(head, c0 * radius)
    inside = (head > 0) & (far > head)
    rate = eta * gamma if mode == "paper" else np.log1p(eta * gamma)
    value = np.where(inside, np.log(np.where(inside, far / np.where(inside, head, 1.0), 1.0)) / rate, np.nan)
    free, spread = np.broadcast_arrays(np.maximum(_head(eta, gamma, 2.0, start, bias, 0.0, mode), 0.0), noise)
    with np.errstate(over="ignore"):
        sigmas = np.divide(free, spread, out=np.where(free > 0, np.inf, 0.0), where=spread > 0)
        least = np.minimum(2 * np.exp(-(sigmas**2) * gamma / eta), 1.0)
    noisier = _head(eta, gamma, delta, start, bias, 1.01 * noise + 1e-6, mode)
    return answer(
        "escape time (OmniISR, eq. 21)",
        value,
        mode=mode,
        conditions=[("y0 exceeds the push of bias and noise", head > 0), ("C0 R > d", far > head)],
        claims=[("more noise shortens the escape (text after Theorem 6)", noisier > head)],
        terms={"d": head, "least delta with a bound": least},
        because=[
            (head <= 0, "bias and noise outweigh the start y0: d <= 0"),
            ((head > 0) & (far <= head), "the start lies outside the neighbourhood already: C0 R <= d"),
        ],
    )


def escape_best_step(
    *,
    gamma: Real = 1.0,
    radius: float = 10.0,
    delta: float = 0.1,
    start: float = 1.0,
    bias: float = 0.05,
    noise: float = 0.1,
    c0: float = 1.0,
) -> Answer:
    """The step size eta* at which eq. 21, as printed, is least: the bottom of Fig. 7(b)'s U.

    d depends on eta and gamma through q = eta/gamma alone, so eta*/gamma is one number for every gamma: the
    root of q (-d'(q))/d(q) = ln(C0 R/d(q)), which is unique.

    Args:
        gamma: size of the negative curvature.
        radius: R.
        delta: probability of failure.
        start: displacement y0.
        bias: B_eff.
        noise: sigma_eff.
        c0: the paper's constant C0.

    Example:
        >>> round(escape_best_step(gamma=1.0).value, 2)
        7.56

    Reference: OmniISR, Theorem 6, eq. 21 (minimised over eta).
    """
    gamma, start = positive("gamma", gamma), float(positive("start", start))
    far = float(positive("c0", c0) * positive("radius", radius))
    slope, drag = float(real("bias", bias)), float(real("noise", noise))
    drag *= float(np.sqrt(np.log(2 / real("delta", delta, high=1, open_low=True))))
    name = "best step eta* of the escape time (OmniISR, eq. 21)"
    if far <= start:
        return answer(name, gamma * np.nan, because=[(np.array(True), "the start lies outside already: C0 R <= y0")])
    if slope == drag == 0:
        return answer(
            name, gamma * np.inf, because=[(np.array(True), "without bias and noise a larger step is better")]
        )
    # The domain ends where d(q) = start - slope q - drag sqrt(q) = 0, a quadratic in sqrt(q).
    end = (2 * start / (drag + np.sqrt(drag**2 + 4 * slope * start))) ** 2
    low, high = 0.0, end
    for _ in range(200):
        q = (low + high) / 2
        head = start - slope * q - drag * np.sqrt(q)
        rising = head <= 0 or (slope * q + drag * np.sqrt(q) / 2) / head > np.log(far / head)
        low, high = (low, q) if rising else (q, high)
    return answer(name, gamma * high, terms={"eta*/gamma": high, "largest eta/gamma with a bound": end})


def escape_trends(**constants: float) -> tuple[Condition, ...]:
    """What Fig. 7 and the text say about eq. 21, tried on a grid with the constants of `escape_time`.

    Example:
        >>> [c.everywhere for c in escape_trends()]
        [True, True, True, True, False, False, False]

    Reference: OmniISR, Fig. 7, Table VI and section 3.3.6.
    """
    eta, gamma = constants.pop("eta", 0.08), constants.pop("gamma", 0.05)

    def time(**changed: Any) -> Any:
        return escape_time(**{"eta": eta, "gamma": gamma, **constants, **changed}).value

    def rises(values: Any) -> bool:
        kept = values[np.isfinite(values)]
        return len(kept) > 1 and bool(np.all(np.diff(kept) > 0))

    best = escape_best_step(gamma=gamma, **constants).value
    curvatures, radii = np.geomspace(1e-3, 1.0, 200), np.geomspace(2.0, 1e3, 200)
    deltas, noises = np.geomspace(0.99, 1e-8, 200), np.linspace(0.0, 1.0, 200)
    tenfold = time(radius=10 * radii) - time(radius=radii)
    # A curve of panel (c) is absent at small R only where C0 R <= d, and d is larger for larger gamma.
    near = np.geomspace(1e-2, 1e2, 400)
    begins = [
        int(np.argmax(bound))
        for g in (0.01, 0.02, 0.05, 0.5)
        if np.any(bound := np.isfinite(time(gamma=g, radius=near)))
    ]
    return (
        Condition("(a) T falls as gamma grows", rises(time(gamma=curvatures)[::-1])),
        Condition(
            "(b) T is U-shaped in eta, and eta* is proportional to gamma",
            bool(np.isfinite(best))
            and rises(time(eta=np.linspace(best, 1.2 * best, 50)))
            and rises(time(eta=np.linspace(0.05 * best, best, 50))[::-1])
            and bool(np.isclose(escape_best_step(gamma=2 * gamma, **constants).value, 2 * best, rtol=1e-9)),
        ),
        Condition(
            "(c) T(10 R) - T(R) = ln 10/(eta gamma)",
            bool(np.allclose(tenfold[np.isfinite(tenfold)], np.log(10) / (eta * gamma), rtol=1e-9)),
        ),
        Condition("(d) T rises as delta falls", rises(time(delta=deltas))),
        Condition("(c) at small R it is the curve of smallest gamma that is absent", begins != sorted(begins)),
        Condition("(d) there is a bound for every delta", bool(np.all(np.isfinite(time(delta=deltas, gamma=0.01))))),
        Condition("noise shortens the escape", rises(time(noise=noises)[::-1])),
    )


def escape_round(*, curve: Vector, window: int = 3, share: float = 0.1, higher_is_better: bool = True) -> Answer:
    """The round in which a measured curve leaves its plateau.

    The first round r (counted from 1) whose mean over the rounds r - window + 1 .. r exceeds
    start + share (final - start), start and final being the first and the last value.

    Args:
        curve: the metric after each round.
        window: rounds averaged.
        share: part of the whole gain that counts as having left.
        higher_is_better: False for a loss.

    Example:
        >>> escape_round(curve=(0.1, 0.1, 0.1, 0.1, 0.4, 0.8, 0.9)).value
        5.0

    Reference: OmniISR, Fig. 6 (whose rule is not given; this one is ours).
    """
    values = np.atleast_1d(real("curve", curve, low=-np.inf))
    if window < 1 or values.ndim != 1 or len(values) < max(window, 2):
        raise UserError(
            f"a curve of {values.size} rounds and a window of {window} do not fit. "
            "Give at least two rounds and a window between 1 and their number."
        )
    sign = 1.0 if higher_is_better else -1.0
    values = sign * values
    gain = values[-1] - values[0]
    means = np.convolve(values, np.full(window, 1 / window), mode="valid")
    over = np.flatnonzero(means > values[0] + real("share", share, high=1) * gain)
    found = gain > 0 and len(over) > 0
    return answer(
        "round in which the curve leaves its plateau (OmniISR, Fig. 6)",
        np.float64(over[0] + window) if found else np.float64(np.nan),
        terms={"start": sign * values[0], "gain": gain},
        because=[
            (gain <= 0, "the curve ends no better than it began"),
            (gain > 0 and not found, f"its mean over {window} rounds never rises enough"),
        ],
    )
