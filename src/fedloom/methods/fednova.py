"""FedAvg with updates divided by the local work: ``w <- w + (sum_k p_k a_k) sum_k p_k (theta_k - w) / a_k``."""

from __future__ import annotations

from fedloom import tensors
from fedloom.methods.fedavg import fedavg
from fedloom.spec.method import Method
from fedloom.spec.parts import ServerStage, Stage
from fedloom.spec.reducers import mean
from fedloom.spec.registry import recipe
from fedloom.spec.seen import Cohort, Seen
from fedloom.tensors import Leaves, Message


@recipe(
    paper="Wang et al., Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization, NeurIPS 2020"
)
def fednova() -> Method:
    """FedAvg with updates divided by the local work: ``w <- w + (sum_k p_k a_k) sum_k p_k (theta_k - w) / a_k``.

    ``a_k = K``, the steps really made; with SGD momentum rho, ``a_k = (K - rho (1 - rho^K)/(1 - rho)) / (1 - rho)``. Clients
    with equal K give FedAvg to rounding.
    """

    def work(message: Message, memory: Leaves, seen: Seen) -> tuple[Message, Leaves]:
        steps, rho = seen.steps["main"].clamp(min=1), seen.momenta["main"]
        a = (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho) if rho else steps
        return {**message, "fednova": {"weight": seen.n / a, "work": a, "inverse": 1 / a}}, memory

    def rescale(reduced: Message, memory: Leaves, cohort: Cohort) -> tuple[Message, Leaves]:
        # The delta is the mean with weights p_k / a_k, which were normalised by their sum.
        factor = reduced["fednova"]["work"] * reduced["fednova"]["inverse"]
        return {**reduced, "delta": tensors.scale(reduced["delta"], factor)}, memory

    method = fedavg().replacing_reducer("fednova", "delta", mean("fednova"))
    return method.adding(
        stages=(Stage(owner="fednova", fn=work, entries={"fednova": mean("n")}),),
        server=(ServerStage(owner="fednova", fn=rescale),),
    )
