"""FedAvg with Adam on the server: ``w <- w + eta_s m / (sqrt(v) + tau)``."""

from __future__ import annotations

from torch import Tensor

from fedloom.methods.fedavg import fedavg
from fedloom.spec.method import Method
from fedloom.spec.registry import recipe
from fedloom.spec.server_optimizer import Step, server_step
from fedloom.tensors import Leaves

_ADAPTIVE = "Reddi et al., Adaptive Federated Optimization, ICLR 2021, Algorithm 2"
# The best settings of the authors' code, with one local epoch of SGD at 10^-1.5, 10^-1.5 and 1.
_TASKS = {
    "emnist": {"eta_s": 10**-2.5, "tau": 1e-4},
    "cifar100": {"eta_s": 1.0, "tau": 0.1},
    "shakespeare": {"eta_s": 0.01, "tau": 1e-3},
}


def _adaptive(owner: str, second: Step, eta_s: float, b1: float, tau: float) -> Method:
    """``m <- b1 m + (1-b1) D``, v by ``second``, ``w <- w + eta_s m / (sqrt(v) + tau)``; no bias correction."""

    def step(delta: Tensor, state: Leaves) -> tuple[Tensor, Leaves]:
        m = b1 * state["m"] + (1 - b1) * delta
        v, _ = second(delta, state)
        return eta_s * m / (v.sqrt() + tau), {"m": m, "v": v}

    return fedavg().adding(server=(server_step(owner, {"m": 0.0, "v": tau**2}, step),))


@recipe("eta_s > 0", "0 <= b1 < 1", "0 <= b2 < 1", "tau > 0", paper=_ADAPTIVE, presets=_TASKS)
def fedadam(eta_s: float = 0.01, b1: float = 0.9, b2: float = 0.99, tau: float = 1e-3) -> Method:
    """FedAvg with Adam on the server: ``w <- w + eta_s m / (sqrt(v) + tau)``.

    ``m <- b1 m + (1-b1) D``, ``v <- b2 v + (1-b2) D^2``, ``v_0 = tau^2``, no bias correction, ``D = sum_k p_k (theta_k - w)``.
    Trainable leaves only; buffers are averaged.

    Args:
        eta_s: the server's step.
        b1: decay of the first moment.
        b2: decay of the second moment.
        tau: adaptivity; large values give back FedAvg with momentum.
    """
    return _adaptive("fedadam", lambda d, s: (b2 * s["v"] + (1 - b2) * d**2, s), eta_s, b1, tau)
