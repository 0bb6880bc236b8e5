"""FedAvg with momentum on the server: ``v <- beta v + D``, ``w <- w + eta_s v``, ``D = sum_k p_k (theta_k - w)``."""

from __future__ import annotations

from fedloom.methods.fedavg import fedavg
from fedloom.plugins.server_momentum import server_momentum
from fedloom.spec.method import Method, compose
from fedloom.spec.registry import recipe


@recipe(
    "0 <= beta < 1",
    "eta_s > 0",
    paper="Hsu et al., Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification, 2019",
    presets={"omniisr": {"beta": 0.7}, "omniisr_09": {"beta": 0.9}},
    plugin="server_momentum",
)
def fedavgm(beta: float = 0.9, eta_s: float = 1.0) -> Method:
    """FedAvg with momentum on the server: ``v <- beta v + D``, ``w <- w + eta_s v``, ``D = sum_k p_k (theta_k - w)``.

    Args:
        beta: momentum; 0 is FedAvg bit for bit.
        eta_s: the server's step.
    """
    return compose(fedavg(), server_momentum(beta, eta_s))
