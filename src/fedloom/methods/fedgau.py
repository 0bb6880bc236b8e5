"""FedAvg with weights from the pictures' statistics: ``p_k`` proportional to ``n_k / (D_k + eps)``."""

from __future__ import annotations

import torch
from torch import Tensor

from fedloom.errors import UserError
from fedloom.methods.fedavg import fedavg
from fedloom.spec.method import Method
from fedloom.spec.parts import Prepare, Prepared, Receive, Send, ServerStage, Stage, Sweep
from fedloom.spec.reducers import mean, stack, total
from fedloom.spec.registry import recipe
from fedloom.spec.seen import Cohort, Seen
from fedloom.spec.view import View
from fedloom.tasks.batch import Batch
from fedloom.tensors import Leaves, Message


def bhattacharyya(mean_a: Tensor, var_a: Tensor, mean_b: Tensor, var_b: Tensor) -> Tensor:
    """``1/4 (m_a - m_b)^2 / (v_a + v_b) + 1/2 ln((v_a + v_b) / (2 sqrt(v_a v_b)))``, the distance of two Gaussians.

    Example:
        >>> one, two = torch.tensor(1.0).double(), torch.tensor(2.0).double()
        >>> round(float(bhattacharyya(one * 0, one, one, two)), 6)
        0.112779
    """
    tiny = torch.finfo(var_a.dtype).tiny
    both = (var_a + var_b).clamp(min=tiny)
    spread_ = (2 * (var_a.clamp(min=tiny).sqrt() * var_b.clamp(min=tiny).sqrt())).clamp(min=tiny)
    return 0.25 * (mean_a - mean_b) ** 2 / both + 0.5 * (both / spread_).log()


def matched(mean: Tensor, var: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
    """Moment match of Gaussians along axis 0: ``mu = mean mu_i``, ``var = mean(var_i + mu_i^2) - mu^2``, weighted by n."""
    n = n / n.sum()
    centre = (n * mean).sum(0)
    return centre, (n * (var + mean**2)).sum(0) - centre**2


@recipe(
    "eps > 0",
    paper="Kou et al., Fast-Convergent and Communication-Alleviated Heterogeneous Hierarchical Federated Learning in "
    "Autonomous Driving, IEEE T-ITS 2025 (one level instead of two)",
)
def fedgau(eps: float = 1e-3) -> Method:
    """FedAvg with weights from the pictures' statistics: ``p_k`` proportional to ``n_k / (D_k + eps)``.

    A picture is a Gaussian (mean and variance of its pixels, averaged over channels), a client the moment match of its pictures, and
    D_k the Bhattacharyya distance of client k to the union of all. Clients send (mu_k, var_k) once, before round one. Equal
    clients give FedAvg to rounding. The proportionality is a reading of the paper: its public code only has the resulting numbers.

    Args:
        eps: keeps the weight of a client at distance 0 finite.
    """

    def statistics(view: View, batch: Batch, seen: Seen) -> Leaves:
        if not isinstance(batch.x, Tensor):
            raise UserError("fedgau: it needs one tensor of inputs per row, but the rows have several")
        x = batch.x.to(seen.n.dtype)
        pixels = x.flatten(2) if x.dim() > 2 else x[:, None]
        mu, var = pixels.mean(2).mean(1), pixels.var(2, correction=0).mean(1)
        return {"mean": batch.sum(mu), "square": batch.sum(var + mu**2)}

    def tell(message: Message, memory: Leaves, seen: Seen) -> tuple[Message, Leaves]:
        mu, square = (seen.swept["fedgau"][k] / seen.n for k in ("mean", "square"))
        return {**message, "fedgau": {"mean": mu, "var": square - mu**2}}, memory

    def weigh(reduced: Message, memory: Leaves, cohort: Cohort) -> tuple[Message, Leaves]:
        mu, var = reduced["fedgau"]["mean"].double(), reduced["fedgau"]["var"].double()
        n = torch.tensor(cohort.rows, dtype=torch.float64, device=mu.device)
        weight = n / (bhattacharyya(mu, var, *matched(mu, var, n)) + eps)
        return reduced, {"weight": weight / weight.sum()}

    def address(memory: Leaves, cohort: Cohort) -> Prepared:
        place = {name: i for i, name in enumerate(cohort.order)}
        # A participant that is none of the federation's clients works alone, where any weight does.
        one = {i: memory["weight"][place[i]] if i in place else memory["weight"].sum() for i in cohort.ids}
        return Prepared(memory=memory, addressed={i: {"weight": w} for i, w in one.items()})

    def attach(message: Message, memory: Leaves, seen: Seen) -> tuple[Message, Leaves]:
        return {**message, "weight": seen.addressed["fedgau"]}, memory

    method = fedavg().replacing_reducer("fedgau", "delta", mean("weight"))
    method = method.replacing_schedule("fedgau", setup=(Receive(), Sweep(name="fedgau", fn=statistics), Send()))
    return method.adding(
        stages=(
            Stage(owner="fedgau", fn=tell, entries={"fedgau": stack()}, when="setup"),
            Stage(owner="fedgau", fn=attach, entries={"weight": total()}),
        ),
        prepare=(Prepare(owner="fedgau", fn=address),),
        server=(ServerStage(owner="fedgau", fn=weigh, memory=lambda f: {"weight": torch.zeros(0)}, when="setup"),),
    )
