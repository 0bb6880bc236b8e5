"""FedNTD: distillation of the received model on the classes other than the label."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from fedloom.methods.fedavg import fedavg
from fedloom.spec.class_losses import divergence, mean_over, teacher, true_class
from fedloom.spec.method import Method
from fedloom.spec.parts import Term
from fedloom.spec.registry import recipe
from fedloom.spec.seen import Seen
from fedloom.spec.view import View
from fedloom.tasks.batch import Batch


@recipe(
    "beta >= 0",
    "tau > 0",
    paper="Lee et al., Preservation of the Global Knowledge by Not-True Distillation in Federated Learning, NeurIPS 2022",
    presets={"authors": {"beta": 1.0, "tau": 3.0}},
)
def fedntd(beta: float = 1.0, tau: float = 1.0) -> Method:
    """FedAvg that keeps what the received model says of the other classes.

    Adds ``beta tau^2 mean_i KL(softmax_{c != y}(z_global / tau) || softmax_{c != y}(z / tau))``, z the logits; the received model is
    in evaluation mode.

    Args:
        beta: strength; 0 is FedAvg bit for bit.
        tau: temperature.
    """

    def term(view: View, batch: Batch, seen: Seen) -> Tensor:
        others = ~true_class(batch, view.logits)
        gap = divergence(view.logits, teacher(view, seen).logits, others, tau)
        return beta * tau**2 * mean_over(gap, batch)

    method = replace(fedavg(), tasks=("classification", "segmentation"))
    return method.adding(terms=(Term(owner="fedntd", fn=term),)) if beta else method
