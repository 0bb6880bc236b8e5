"""Whether the cloud's gradient and the federation's pull the same way: OmniISR's Lemma 5."""

from __future__ import annotations

import numpy as np

from fedloom.errors import UserError
from fedloom.theory.answer import Answer, Mode, Real, Vector, answer, check_mode, real


def inner_product(
    *,
    gradient: Vector,
    bias_cloud: Vector,
    bias_federated: Vector,
    noise_cloud: float = 0.0,
    noise_federated: float = 0.0,
    mode: Mode = "sound",
) -> Answer:
    """Expected inner product of cloud and federated gradient, E<g_CL, g_FL>.

    ||g||^2 + <g, b_c + b_f> + <b_c, b_f> + e = (||g||^2 + ||g + b_c + b_f||^2 - ||b_c||^2 - ||b_f||^2)/2 + e

    paper: e >= -(s_c^2 + s_f^2)/2, taken at its worst
    sound: e = 0, as the independence stated in Assumption 4 makes it

    Hence no conflict whenever ||b_c||^2 + ||b_f||^2 <= ||g||^2, which the paper's ||b_c|| + ||b_f|| < ||g||
    implies.

    Args:
        gradient: true gradient g.
        bias_cloud: bias b_c of the cloud gradient.
        bias_federated: bias b_f of the federated gradient.
        noise_cloud: variance s_c^2 (mode paper).
        noise_federated: variance s_f^2 (mode paper).
        mode: as printed, or corrected.

    Example:
        >>> inner_product(gradient=(1.0, 0.0), bias_cloud=(-0.5, 0.0), bias_federated=(0.0, 0.5)).value
        0.5

    Reference: OmniISR, Lemma 5, eqs. 19 and 20.
    """
    check_mode(mode)
    vectors = [
        np.atleast_1d(real(name, vector, low=-np.inf))
        for name, vector in (
            ("gradient", gradient),
            ("bias_cloud", bias_cloud),
            ("bias_federated", bias_federated),
        )
    ]
    if len({vector.shape for vector in vectors}) != 1:
        shapes = ", ".join(str(vector.shape) for vector in vectors)
        raise UserError(f"gradient and biases have shapes {shapes}. Give three vectors of one length.")
    g, b, f = (vector.ravel() for vector in vectors)
    residual = (real("noise_cloud", noise_cloud) + real("noise_federated", noise_federated)) / 2
    residual = -residual if mode == "paper" else 0.0 * residual
    norms = [float(np.linalg.norm(vector)) for vector in (g, b, f)]
    return answer(
        "inner product of cloud and federated gradient (OmniISR, eq. 19)",
        g @ g + g @ (b + f) + b @ f + residual,
        mode=mode,
        claims=[
            ("||b_c|| + ||b_f|| < ||g||", norms[1] + norms[2] < norms[0]),
            ("||b_c||^2 + ||b_f||^2 <= ||g||^2 (enough)", norms[1] ** 2 + norms[2] ** 2 <= norms[0] ** 2),
        ],
        terms={
            "gradient": g @ g,
            "gradient and bias": g @ (b + f),
            "bias and bias": b @ f,
            "noise": residual,
        },
    )


def non_conflict(*, gradient: Real, bias_cloud: Real, bias_federated: Real) -> Answer:
    """The least inner product that three norms allow, min <g + b_c, g + b_f> over all directions.

    With ||g|| = 1, a = ||b_c||, b = ||b_f|| it is

    (1 - a)(1 - b) for a + b <= 1;  (1 - a^2 - b^2)/2 for a + b >= 1 >= |a - b|;  1 - a b - |a - b| beyond.

    So conflict is ruled out (in two dimensions or more) exactly when a^2 + b^2 <= 1, a weaker demand than
    the paper's a + b < 1.

    Args:
        gradient: norm of the true gradient.
        bias_cloud: norm of the cloud gradient's bias.
        bias_federated: norm of the federated gradient's bias.

    Example:
        >>> round(non_conflict(gradient=1.0, bias_cloud=0.6, bias_federated=0.8).value, 12)
        0.0

    Reference: OmniISR, Lemma 5, eq. 20 (sharpened).
    """
    g, a, b = (
        real("gradient", gradient),
        real("bias_cloud", bias_cloud),
        real("bias_federated", bias_federated),
    )
    # Twice the product is ||g||^2 + ||g + b_c + b_f||^2 - ||b_c||^2 - ||b_f||^2: the second alone turns with
    # the directions.
    nearest = np.maximum(np.maximum(g - a - b, np.abs(a - b) - g), 0.0)
    value = (g**2 + nearest**2 - a**2 - b**2) / 2
    return answer(
        "least inner product of cloud and federated gradient (OmniISR, eq. 20)",
        value,
        conditions=[("||b_c||^2 + ||b_f||^2 <= ||g||^2", a**2 + b**2 <= g**2)],
        claims=[("||b_c|| + ||b_f|| < ||g||", a + b < g)],
    )
