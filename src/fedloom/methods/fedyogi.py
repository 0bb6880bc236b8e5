"""FedAvg with Yogi on the server: ``w <- w + eta_s m / (sqrt(v) + tau)``."""

from __future__ import annotations

import torch

from fedloom.methods.fedadam import _ADAPTIVE, _TASKS, _adaptive
from fedloom.spec.method import Method
from fedloom.spec.registry import recipe


@recipe("eta_s > 0", "0 <= b1 < 1", "0 <= b2 < 1", "tau > 0", paper=_ADAPTIVE, presets=_TASKS)
def fedyogi(eta_s: float = 0.01, b1: float = 0.9, b2: float = 0.99, tau: float = 1e-3) -> Method:
    """FedAvg with Yogi on the server: ``w <- w + eta_s m / (sqrt(v) + tau)``.

    ``m <- b1 m + (1-b1) D``, ``v <- v - (1-b2) D^2 sign(v - D^2)``, ``v_0 = tau^2``, no bias correction, ``D = sum_k p_k
    (theta_k - w)``. Trainable leaves only; buffers are averaged.

    Args:
        eta_s: the server's step.
        b1: decay of the first moment.
        b2: decay of the second moment.
        tau: adaptivity.
    """
    return _adaptive("fedyogi", lambda d, s: (s["v"] - (1 - b2) * d**2 * torch.sign(s["v"] - d**2), s), eta_s, b1, tau)
