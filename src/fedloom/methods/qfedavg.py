"""FedAvg that favours clients with large losses: ``w <- w - sum_k F_k^q D_k / sum_k h_k``."""

from __future__ import annotations

from fedloom import tensors
from fedloom.methods.fedavg import fedavg
from fedloom.spec.method import Method
from fedloom.spec.parts import ServerStage, Stage, Sweep
from fedloom.spec.reducers import mean, total
from fedloom.spec.registry import recipe
from fedloom.spec.seen import Cohort, Seen
from fedloom.spec.view import View
from fedloom.tasks.batch import Batch
from fedloom.tensors import Leaves, Message


@recipe(
    "q >= 0",
    paper="Li et al., Fair Resource Allocation in Federated Learning, ICLR 2020, Algorithm 2",
    presets={"vehicle": {"q": 5.0}, "shakespeare": {"q": 0.001}},  # with steps of 0.01 and 0.8
)
def qfedavg(q: float = 1.0) -> Method:
    """FedAvg that favours clients with large losses: ``w <- w - sum_k F_k^q D_k / sum_k h_k``.

    ``D_k = L (w - theta_k)``, ``L = 1/eta``, ``h_k = q F_k^(q-1) ||D_k||^2 + L F_k^q``, and F_k the client's mean loss under the
    received w (evaluation mode). The step is the shorter the longer the updates are: with many local steps it is slow.

    Args:
        q: fairness; 0 is FedAvg with equal weights bit for bit.
    """
    if q == 0:
        return fedavg("uniform")

    def loss(view: View, batch: Batch, seen: Seen) -> Leaves:
        return {"loss": view.loss() * batch.count()}

    def weigh(message: Message, memory: Leaves, seen: Seen) -> tuple[Message, Leaves]:
        shared = {name: seen.gated(name, d) for name, d in message["delta"].items()}
        # F^(q-1) has no value at F = 0 for q < 1.
        f, step = (seen.swept["qfedavg"]["loss"] / seen.n).clamp(min=1e-10), 1 / seen.lr
        h = q * f ** (q - 1) * step**2 * tensors.square_norm(shared) + step * f**q
        return {**message, "qfedavg": {"weight": f**q, "h": h}}, memory

    def rescale(reduced: Message, memory: Leaves, cohort: Cohort) -> tuple[Message, Leaves]:
        # The delta is the mean with weights F_k^q, which were normalised by their sum.
        sums = reduced["qfedavg"]
        return {**reduced, "delta": tensors.scale(reduced["delta"], sums["weight"] / sums["h"] / cohort.lr)}, memory

    method = fedavg().sweeping(Sweep(name="qfedavg", fn=loss, at="received"), at="start")
    return method.replacing_reducer("qfedavg", "delta", mean("qfedavg")).adding(
        stages=(Stage(owner="qfedavg", fn=weigh, entries={"qfedavg": total()}),),
        server=(ServerStage(owner="qfedavg", fn=rescale),),
    )
