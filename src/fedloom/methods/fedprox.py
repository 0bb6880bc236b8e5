"""FedAvg with a proximal term: clients minimise ``f_k(theta) + (mu/2) ||theta - w||^2``."""

from __future__ import annotations

from fedloom.methods.fedavg import fedavg
from fedloom.plugins.proximal import proximal
from fedloom.spec.method import Method, compose
from fedloom.spec.registry import recipe


@recipe(
    "mu >= 0",
    paper="Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020",
    presets={"fedaims": {"mu": 0.5}, "omniisr": {"mu": 0.005}, "fedmap": {"mu": 2.0}},
    plugin="proximal",
)
def fedprox(mu: float = 0.01) -> Method:
    """FedAvg with a proximal term: clients minimise ``f_k(theta) + (mu/2) ||theta - w||^2``.

    Args:
        mu: strength; 0 is FedAvg bit for bit.
    """
    return compose(fedavg(), proximal(mu))
