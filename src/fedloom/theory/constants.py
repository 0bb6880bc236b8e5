"""The constants of OmniISR's assumptions: smoothness, gradient bound, noise; local steps; heterogeneity."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedloom.errors import UserError
from fedloom.theory.answer import Answer, Mode, Real, Vector, answer, check_mode, positive, real


def _taps(mi: Any, ne: Any, alpha: Any, lam: Any, *, power: int) -> tuple[Any, Any]:
    """The taps' constants times the powers of their weights; a single weight serves all taps."""
    mi, ne = np.atleast_1d(real("mi", mi)), np.atleast_1d(real("ne", ne))
    alpha, lam = np.atleast_1d(real("alpha", alpha)), np.atleast_1d(real("lam", lam))
    for name, weights, values in (("alpha", alpha, mi), ("lam", lam, ne)):
        if len(weights) not in (1, len(values)):
            raise UserError(f"{name} has {len(weights)} weights for {len(values)} taps. Give one, or one for each tap.")
    return alpha**power * mi, lam**power * ne


def smoothness(
    *, ce: float, mi: Vector, ne: Vector, alpha: Vector = (0.1,), lam: Vector = (0.01,), mode: Mode = "sound"
) -> Answer:
    """Smoothness L of the total loss CE + sum_m (alpha_m MI_m + lam_m NE_m).

    paper: L = max(L_CE, alpha_m L_MI_m, lam_m L_NE_m)
    sound: L = L_CE + sum_m (alpha_m L_MI_m + lam_m L_NE_m)

    The paper's form is wrong: a sum of smooth functions is smooth with the *sum* of the constants (two copies
    of x^2/2 make x^2, whose constant is 2, not 1).

    Args:
        ce: smoothness of the cross-entropy.
        mi: smoothness of the MI loss at each tap.
        ne: smoothness of the NE loss at each tap.
        alpha: weights of the MI losses (one for all taps, or one each).
        lam: weights of the NE losses (one for all taps, or one each).
        mode: as printed, or corrected.

    Example:
        >>> smoothness(ce=1.0, mi=(2.0, 2.0), ne=(1.0, 1.0), alpha=(0.5,), lam=(0.5,)).value
        4.0

    Reference: OmniISR, Assumption 1.
    """
    check_mode(mode)
    ce = real("ce", ce)
    mis, nes = _taps(mi, ne, alpha, lam, power=1)
    parts = np.concatenate([np.atleast_1d(ce), mis, nes])
    return answer(
        "smoothness L (OmniISR, Assumption 1)",
        parts.max() if mode == "paper" else parts.sum(),
        mode=mode,
        terms={"cross-entropy": ce, "MI": mis.sum(), "NE": nes.sum()},
    )


def squared_bound(
    *, ce: float, mi: Vector, ne: Vector, alpha: Vector = (0.1,), lam: Vector = (0.01,), mode: Mode = "sound"
) -> Answer:
    """G^2 (bound on E||g||^2) or sigma^2 (noise) of the total loss from those of its parts.

    paper: S = S_CE + sum_m (alpha_m^2 S_MI_m + lam_m^2 S_NE_m)
    sound: (2M + 1) S, for M taps (a term of weight 0 is not counted)

    The paper's form is wrong: all the parts are computed on the same mini-batch, so they are not independent
    and their squares do not simply add. `terms` also holds the sharper (sqrt(S_CE) + sum_m ...)^2.

    Args:
        ce: squared constant of the cross-entropy.
        mi: squared constant of the MI loss at each tap.
        ne: squared constant of the NE loss at each tap.
        alpha: weights of the MI losses (one for all taps, or one each).
        lam: weights of the NE losses (one for all taps, or one each).
        mode: as printed, or corrected.

    Example:
        >>> squared_bound(ce=1.0, mi=(1.0,), ne=(1.0,), alpha=(1.0,), lam=(1.0,), mode="paper").value
        3.0
        >>> squared_bound(ce=1.0, mi=(1.0,), ne=(1.0,), alpha=(1.0,), lam=(1.0,)).value
        9.0

    Reference: OmniISR, Assumptions 2 and 3.
    """
    check_mode(mode)
    ce = real("ce", ce)
    mis, nes = _taps(mi, ne, alpha, lam, power=2)
    parts = np.concatenate([np.atleast_1d(ce), mis, nes])
    built = 1 + np.count_nonzero(parts[1:])
    return answer(
        "squared bound, G^2 or sigma^2 (OmniISR, Assumptions 2, 3)",
        parts.sum() * (1 if mode == "paper" else built),
        mode=mode,
        terms={"sum of squares": parts.sum(), "square of the sum": np.sqrt(parts).sum() ** 2},
    )


def local_steps(*, epochs: Real, samples: Real, batch: Real) -> Answer:
    """Local SGD steps K = E ceil(n/B) of a client in a round.

    Every bound here takes K where the papers write E: their theorems count local *steps*, their algorithms
    local *epochs*.

    Args:
        epochs: local epochs E.
        samples: training rows n of the client.
        batch: rows B of a mini-batch.

    Example:
        >>> local_steps(epochs=5, samples=100, batch=64).value
        10.0

    Reference: OmniISR, Theorem 3 against Algorithm 1.
    """
    epochs, samples, batch = (
        positive("epochs", epochs),
        positive("samples", samples),
        positive("batch", batch),
    )
    return answer("local steps K = E ceil(n/B)", epochs * np.ceil(samples / batch))


def heterogeneity(*, weights: Vector, gradients: Any) -> Answer:
    """Heterogeneity H = sum_n w_n ||g_n - gbar||^2 with gbar = sum_n w_n g_n.

    Args:
        weights: weight of each client; counts will do, they are scaled to sum 1.
        gradients: a client's gradient in each row (a plain list: one number each).

    Example:
        >>> heterogeneity(weights=(0.5, 0.5), gradients=(1.0, -1.0)).value
        1.0

    Reference: OmniISR, eq. 13.
    """
    weights = np.atleast_1d(real("weights", weights))
    rows = np.atleast_1d(real("gradients", gradients, low=-np.inf))
    if len(rows) != len(weights) or not weights.sum() > 0:
        raise UserError(
            f"{len(weights)} weights of sum {weights.sum():g} for {len(rows)} gradients. "
            "Give one weight for each gradient, not all zero."
        )
    rows, weights = rows.reshape(len(rows), -1), weights / weights.sum()
    mean = weights @ rows
    value = weights @ ((rows - mean) ** 2).sum(axis=1)
    return answer("heterogeneity H (OmniISR, eq. 13)", value, terms={"||gbar||^2": mean @ mean})


def contraction(*, with_isr: Real, without: Real) -> Answer:
    """ISR's contraction kappa = H with ISR / H without, both measured at the same parameters.

    The paper assumes kappa < 1; nothing in it proves so. Give arrays for one kappa a layer.

    Args:
        with_isr: heterogeneity of the gradients of the loss with ISR.
        without: heterogeneity of the gradients of the plain loss.

    Example:
        >>> contraction(with_isr=0.6, without=0.8).value
        0.75

    Reference: OmniISR, section 3.4.2, eqs. 26 and 27.
    """
    with_isr, without = np.broadcast_arrays(real("with_isr", with_isr), real("without", without))
    kappa = np.divide(with_isr, without, out=np.full(without.shape, np.nan), where=without > 0)
    return answer(
        "contraction kappa (OmniISR, eqs. 26, 27)",
        kappa,
        claims=[("kappa < 1: ISR lowers heterogeneity", kappa < 1)],
        because=[(without == 0, "heterogeneity without ISR is 0, so there is nothing to lower")],
    )
