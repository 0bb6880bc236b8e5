"""FedLAG's theory: the sign of A in Theorem 5.3, and what Lemmas 5.1 and 5.2 say."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedloom.errors import UserError
from fedloom.theory.answer import Answer, Mode, Real, answer, check_mode, positive, real


def _coefficient(eta: Any, steps: Any, lips: Any) -> Any:
    return 24 * steps**2 * (steps - 1) * eta**4 * lips**2 - eta**2 * steps


def lag_coefficient(*, eta: Real, steps: Real, smoothness: Real) -> Answer:
    """The factor A = 24 E^2 (E - 1) eta^4 L^2 - eta^2 E of Theorem 5.3's improvement term, and its sign.

    The paper states A > 0 for 1/(2 sqrt6 E^2 L) < eta < 1/(6 E L). It is wrong: A > 0 needs a step above
    1/(L sqrt(24 E (E - 1))), beyond the interval for every E, since 24 E (E - 1) < 36 E^2. On the whole
    interval even A <= -eta^2 E/3, an inequality that the proof itself uses (from eq. 59 to eq. 60).
    Appendix I gets the other sign from "1/(2 sqrt6 E^2 L) > 1/(2 sqrt6 E L)", false for E > 1. With A < 0
    the term *raises* the bound.

    Args:
        eta: step size.
        steps: local steps E (the paper takes full-batch steps, one an epoch).
        smoothness: L.

    Example:
        >>> round(lag_coefficient(eta=0.05, steps=2, smoothness=1.0).value, 6)
        -0.0044

    Reference: FedLAG, Theorem 5.3, eq. 6, and appendix I.
    """
    eta, steps, lips = positive("eta", eta), real("steps", steps, low=1), positive("smoothness", smoothness)
    value = _coefficient(eta, steps, lips)
    low, high = 1 / (2 * np.sqrt(6) * steps**2 * lips), 1 / (6 * steps * lips)
    return answer(
        "coefficient A (FedLAG, Theorem 5.3)",
        value,
        conditions=[("1/(2 sqrt6 E^2 L) < eta < 1/(6 E L)", (low < eta) & (eta < high))],
        claims=[("A > 0", value > 0)],
    )


def lag_interval(*, steps: Real, smoothness: Real) -> Answer:
    """The largest A on Theorem 5.3's interval of step sizes.

    A falls, then rises in eta, so it is largest at an end of the interval. The value is negative for every
    E >= 2; for E = 1 the interval is empty. `terms` holds the ends and the step from which A is positive.

    Args:
        steps: local steps E.
        smoothness: L.

    Example:
        >>> best = lag_interval(steps=2, smoothness=1.0)
        >>> best.value < 0, best.terms["A > 0 from eta"] > best.terms["interval ends at"]
        (True, True)

    Reference: FedLAG, Theorem 5.3.
    """
    steps, lips = np.broadcast_arrays(real("steps", steps, low=1), positive("smoothness", smoothness))
    low, high = 1 / (2 * np.sqrt(6) * steps**2 * lips), 1 / (6 * steps * lips)
    empty = low >= high
    peak = np.maximum(_coefficient(low, steps, lips), _coefficient(high, steps, lips))
    with np.errstate(divide="ignore"):
        turn = 1 / (lips * np.sqrt(24 * steps * (steps - 1)))
    value = np.where(empty, np.nan, peak)
    return answer(
        "largest A on the stated interval (FedLAG, Theorem 5.3)",
        value,
        conditions=[("the interval is not empty", ~empty)],
        claims=[("A > 0 somewhere on the interval", value > 0)],
        terms={"interval begins at": low, "interval ends at": high, "A > 0 from eta": turn},
        because=[(empty, "the interval is empty: 1/(2 sqrt6 E^2 L) >= 1/(6 E L)")],
    )


def _updates(updates: Any) -> Any:
    rows = np.atleast_1d(real("updates", updates, low=-np.inf))
    rows = rows.reshape(len(rows), -1)
    if len(rows) < 2:
        raise UserError(f"{len(rows)} update was given: expected those of at least two users. Give a row for each.")
    return rows


def _factor(eta: Any, steps: Any, mode: Mode) -> Any:
    """The paper's eta, or 1/(eta E): h = theta_E - theta_0 holds eta already, the gradient is -h/(eta E)."""
    check_mode(mode)
    eta, steps = positive("eta", eta), real("steps", steps, low=1)
    return eta if mode == "paper" else 1 / (eta * steps)


def lag_variance(*, updates: Any, eta: float, steps: float = 1.0, mode: Mode = "sound") -> Answer:
    """Lemma 5.2's predicted change of the mean loss when a layer turns personal: -f times a variance.

    (1/U^2) sum_uv (||h_u||^2 - <h_u, h_v>) = (1/U) sum_u ||h_u - hbar||^2 >= 0

    paper: f = eta
    sound: f = 1/(eta E)

    The paper's form is wrong in its factor (h contains eta already), and proves less than it says: the sum
    is the variance of the updates over users, never negative for *any* layer, in conflict or not. It is a
    first-order gain of any personalisation on training loss, and no reason to choose layers by conflict.

    Args:
        updates: a user's update h_u of the layer in each row (a plain list: one number each).
        eta: local step size.
        steps: local steps E.
        mode: as printed, or corrected.

    Example:
        >>> lag_variance(updates=(1.0, 3.0), eta=0.5, steps=2).value
        -1.0

    Reference: FedLAG, Lemma 5.2 and eq. 25.
    """
    rows = _updates(updates)
    variance = ((rows - rows.mean(axis=0)) ** 2).sum(axis=1).mean()
    gram = rows @ rows.T
    return answer(
        "predicted change of the mean loss (FedLAG, Lemma 5.2)",
        -_factor(eta, steps, mode) * variance,
        mode=mode,
        claims=[("some pair of users is in conflict", np.any(gram < 0))],
        terms={"variance of the updates": variance},
    )


def lag_gain(*, updates: Any, eta: float, steps: float = 1.0, mode: Mode = "sound") -> Answer:
    """Lemma 5.1's predicted change of each user's loss: -f <h_u, h_u - hbar>, f as in `lag_variance`.

    The paper states that it is negative for every user. It is wrong: the proof takes *all* pairs to be in
    conflict; a user whose update is shorter than the mean's share in its direction loses, e.g. h = (0.1, 1,
    1).

    Args:
        updates: a user's update h_u of the layer in each row (a plain list: one number each).
        eta: local step size.
        steps: local steps E.
        mode: as printed, or corrected.

    Example:
        >>> lag_gain(updates=(-1.0, 1.0), eta=0.5, steps=2).value
        array([-1., -1.])

    Reference: FedLAG, Lemma 5.1 and eq. 23.
    """
    rows = _updates(updates)
    value = -_factor(eta, steps, mode) * (rows * (rows - rows.mean(axis=0))).sum(axis=1)
    gram = rows @ rows.T
    apart = np.all((gram < 0) | np.eye(len(rows), dtype=bool))
    return answer(
        "predicted change of each user's loss (FedLAG, Lemma 5.1)",
        value,
        mode=mode,
        claims=[("every user gains", np.all(value < 0)), ("all pairs of users are in conflict", apart)],
        terms={"mean over users": value.mean()},
    )
