"""FedAvg with control variates: each local step uses ``g - c_k + c``, means are uniform."""

from __future__ import annotations

from fedloom.methods.fedavg import fedavg
from fedloom.plugins.control_variates import control_variates
from fedloom.spec.method import Method, compose
from fedloom.spec.registry import recipe


@recipe("eta_g > 0", paper="Karimireddy et al., SCAFFOLD, ICML 2020, Algorithm 1", plugin="control_variates")
def scaffold(eta_g: float = 1.0) -> Method:
    """FedAvg with control variates: each local step uses ``g - c_k + c``, means are uniform.

    Args:
        eta_g: the server's step.
    """
    return compose(fedavg(), control_variates(eta_g))
