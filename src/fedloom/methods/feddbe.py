"""FedDBE: features with equal means across clients, and a personal bias b_k for the difference."""

from __future__ import annotations

import torch
from torch import Tensor

from fedloom.errors import UserError
from fedloom.methods.fedavg import fedavg
from fedloom.plugins.prototypes import feature_width
from fedloom.spec.leaves import Facts
from fedloom.spec.method import Method
from fedloom.spec.parts import Extra, Prepare, Prepared, Receive, Send, ServerStage, Stage, Sweep, Term
from fedloom.spec.reducers import mean
from fedloom.spec.registry import recipe
from fedloom.spec.seen import Cohort, Seen
from fedloom.spec.structure import Structure
from fedloom.spec.view import View
from fedloom.tasks.batch import Batch
from fedloom.tensors import Leaves, Message


def mean_gap(m: Tensor, shared: Tensor) -> Tensor:
    """``1/2 mean_d (m_d - Mg_d)^2``."""
    return 0.5 * ((m - shared) ** 2).mean()


@recipe(
    "kappa >= 0",
    "0 < mu <= 1",
    paper="Zhang et al., Eliminating Domain Bias for Federated Learning in Representation Space, NeurIPS 2023, eqs. 5 to 7",
    presets={"original": {"kappa": 50.0, "mu": 1.0}, "small": {"kappa": 1.0}},
)
def feddbe(kappa: float = 50.0, mu: float = 1.0, bias: bool = True) -> Method:
    """FedAvg whose features agree in mean across clients, while a personal bias b_k takes up the difference.

    Clients minimise ``CE(head(z + b_k)) + kappa/2 mean_d (m_k - Mg)^2`` with the running mean ``m_k <- (1 - mu) sg(m_k)
    + mu mean(z)``, zero when the round begins (sg stops the gradient). ``Mg`` is the rows' mean of z under the initial
    model, over all clients, made once before round one. The shared model is tested without a bias. kappa is in units of the
    features: the paper's 50 holds those of small perceptrons where they began, and ``preset="small"`` takes 1.

    Args:
        kappa: strength of the agreement; 0 builds no term.
        mu: weight of the present mini-batch in the running mean.
        bias: whether there is a personal bias; without it and with kappa 0 this is FedAvg bit for bit.
    """

    def add_up(view: View, batch: Batch, seen: Seen) -> Leaves:
        return {"mean": batch.sum(view.z)}

    def average(sums: Leaves, seen: Seen) -> Leaves:
        return {"mean": sums["mean"] / seen.n}

    def tell(message: Message, memory: Leaves, seen: Seen) -> tuple[Message, Leaves]:
        return {**message, "feddbe": seen.swept["feddbe"]}, memory

    def settle(reduced: Message, memory: Leaves, cohort: Cohort) -> tuple[Message, Leaves]:
        return reduced, reduced["feddbe"]

    def blank(facts: Facts) -> Leaves:
        return {"mean": _zeros(facts.structure)}

    def agree(view: View, batch: Batch, seen: Seen, carry: Leaves) -> tuple[Tensor, Leaves]:
        now = batch.sum(view.z) / batch.count().clamp(min=1).to(view.z.dtype)
        m = (1 - mu) * carry["mean"] + mu * now
        return kappa * mean_gap(m, seen.broadcast["feddbe"]["mean"]), {"mean": m}

    method = fedavg()
    if bias:
        extra = Extra(owner="feddbe", build=lambda s, generator: {"bias": _zeros(s)}, kind="personal", role="head")
        method = method.adding(extras=(extra,)).replacing_rewrite(
            "feddbe", lambda z, leaves, seen: z + leaves["feddbe:bias"]
        )
    if not kappa:
        return method
    sweep = Sweep(name="feddbe", fn=add_up, finish=average, taps=("z",))
    return method.replacing_schedule("feddbe", setup=(Receive(), sweep, Send())).adding(
        terms=(Term(owner="feddbe", fn=agree, taps=("z",), carry=lambda s: {"mean": _zeros(s)}),),
        stages=(Stage(owner="feddbe", fn=tell, entries={"feddbe": mean("n")}, when="setup"),),
        prepare=(Prepare(owner="feddbe", fn=lambda memory, cohort: Prepared(memory=memory, broadcast=memory)),),
        server=(ServerStage(owner="feddbe", fn=settle, memory=blank, when="setup"),),
    )


def _zeros(structure: Structure) -> Tensor:
    if structure.task == "segmentation":
        raise UserError(
            "feddbe: it corrects one feature vector per row, and dense prediction has one per pixel; use fedbn"
        )
    return torch.zeros(feature_width(structure), dtype=structure.dtype)
