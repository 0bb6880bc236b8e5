"""FedAvg with other steps on the server: momentum, adaptive steps, extrapolation, normalisation, fairness."""

from __future__ import annotations

import torch
from torch import Tensor

from fedloom import tree
from fedloom.aggregators.steps import Step, server_step
from fedloom.methods.averaging import fedavg
from fedloom.plugins.server_momentum import server_momentum
from fedloom.record import Method, compose
from fedloom.reducers import mean, total
from fedloom.registry import recipe
from fedloom.slots import ServerStage, Stage, Sweep
from fedloom.types import Batch, Cohort, Leaves, Memory, Message, Seen
from fedloom.view import View

_ADAPTIVE = "Reddi et al., Adaptive Federated Optimization, ICLR 2021, Algorithm 2"
# The best settings of the authors' code, with one local epoch of SGD at 10^-1.5, 10^-1.5 and 1.
_TASKS = {
    "emnist": {"eta_s": 10**-2.5, "tau": 1e-4},
    "cifar100": {"eta_s": 1.0, "tau": 0.1},
    "shakespeare": {"eta_s": 0.01, "tau": 1e-3},
}


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


@recipe(
    "eps >= 0",
    paper="Jhunjhunwala et al., FedExP: Speeding Up Federated Averaging via Extrapolation, ICLR 2023, Algorithm 1",
    presets={"emnist": {"eps": 0.1}},
)
def fedexp(eps: float = 1e-3) -> Method:
    """FedAvg with a step length that grows when clients disagree: ``w <- w + eta_g dbar``.

    ``eta_g = max(1, sum_k ||d_k||^2 / (2 M (||dbar||^2 + eps)))``, ``d_k = theta_k - w``, ``dbar = mean_k d_k`` (uniform); norms
    are over all trainable shared leaves jointly. The model that is tested is the mean of the last two w.

    Args:
        eps: keeps the step bounded; constant over rounds.
    """

    def measure(message: Message, memory: Leaves, seen: Seen) -> tuple[Message, Leaves]:
        shared = {name: seen.gated(name, d) for name, d in message["delta"].items()}
        return {**message, "fedexp": {"square": tree.square_norm(shared)}}, memory

    def before(leaves: Leaves) -> Leaves:
        return {f"before:{name}": value for name, value in leaves.items()}

    def stretch(reduced: Message, memory: Leaves, cohort: Cohort) -> tuple[Message, Leaves]:
        dbar = reduced["delta"]
        # dbar = 0 makes any step the same; the smallest normal number keeps the quotient a number.
        bottom = (2 * (tree.square_norm(dbar) + eps)).clamp(min=torch.finfo(torch.float32).tiny)
        eta_g = (reduced["fedexp"]["square"] / bottom).clamp(min=1.0)
        return {**reduced, "delta": tree.scale(dbar, eta_g)}, before(tree.select(cohort.leaves, dbar))

    def tested(leaves: Leaves, memory: Memory) -> Leaves:
        kept = memory["fedexp"]
        return {n: (v + kept[f"before:{n}"]) / 2 if f"before:{n}" in kept else v for n, v in leaves.items()}

    stage = Stage(owner="fedexp", fn=measure, entries={"fedexp": mean("uniform")})
    server = ServerStage(owner="fedexp", fn=stretch, memory=lambda facts: before(facts.travelling(extra=None)))
    method = fedavg().replacing_reducer("fedexp", "delta", mean("uniform"))
    return method.adding(stages=(stage,), server=(server,)).replacing_evaluation("fedexp", tested=tested)


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
        return {**reduced, "delta": tree.scale(reduced["delta"], factor)}, memory

    method = fedavg().replacing_reducer("fednova", "delta", mean("fednova"))
    return method.adding(
        stages=(Stage(owner="fednova", fn=work, entries={"fednova": mean("n")}),),
        server=(ServerStage(owner="fednova", fn=rescale),),
    )


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
        h = q * f ** (q - 1) * step**2 * tree.square_norm(shared) + step * f**q
        return {**message, "qfedavg": {"weight": f**q, "h": h}}, memory

    def rescale(reduced: Message, memory: Leaves, cohort: Cohort) -> tuple[Message, Leaves]:
        # The delta is the mean with weights F_k^q, which were normalised by their sum.
        sums = reduced["qfedavg"]
        return {**reduced, "delta": tree.scale(reduced["delta"], sums["weight"] / sums["h"] / cohort.lr)}, memory

    method = fedavg().sweeping(Sweep(name="qfedavg", fn=loss, at="received"), at="start")
    return method.replacing_reducer("qfedavg", "delta", mean("qfedavg")).adding(
        stages=(Stage(owner="qfedavg", fn=weigh, entries={"qfedavg": total()}),),
        server=(ServerStage(owner="qfedavg", fn=rescale),),
    )
