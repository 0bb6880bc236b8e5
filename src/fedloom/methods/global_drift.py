"""Corrections of local drift in the objective: FedDyn and FedNTD."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from fedloom import tree
from fedloom.methods.averaging import fedavg
from fedloom.objectives import inner_product, quadratic
from fedloom.objectives.classes import divergence, mean_over, teacher, true_class
from fedloom.record import Method
from fedloom.reducers import mean
from fedloom.registry import recipe
from fedloom.slots import ServerStage, Stage, Term
from fedloom.types import Batch, Cohort, Facts, Leaves, Memory, Message, Seen
from fedloom.view import View


@recipe(
    "a > 0",
    paper="Acar et al., Federated Learning Based on Dynamic Regularization, ICLR 2021, Algorithm 1",
    presets={"original": {"a": 0.1}, "omniisr": {"a": 0.005}, "omniisr_001": {"a": 0.01}},
)
def feddyn(a: float = 0.01) -> Method:
    """FedAvg with a regulariser that follows the training: ``f_k(theta) - <g_k, theta> + (a/2) ||theta - w||^2``.

    After training ``g_k <- g_k - a (theta_k - w)``; the server moves ``h <- h - (a/N) sum_{k in S} (theta_k - w)`` and ``w <- w +
    mean_S(theta_k - w) - h/a``. ``mean_S theta_k`` is the model that is tested. It acts on the trainable leaves that are shared in
    the round. Its definition needs plain SGD; gradient clipping (``fl.sgd(grad_clip=10)``, as the authors do) keeps it stable.

    Args:
        a: strength.
    """

    def zeros(facts: Facts) -> Leaves:
        return tree.zeros_like(facts.travelling(extra=None))

    def penalty(view: View, batch: Batch, seen: Seen) -> Tensor:
        names = tuple(n for n in view.trained if seen.specs[n].sent)
        return a * quadratic(names, view.leaves, seen.received, seen)

    def renew(message: Message, memory: Leaves, seen: Seen) -> tuple[Message, Leaves]:
        return message, {n: seen.gated(n, g - a * (seen.final[n] - seen.received[n])) for n, g in memory.items()}

    def settle(reduced: Message, memory: Leaves, cohort: Cohort) -> tuple[Message, Leaves]:
        share = len(cohort) / cohort.population
        moved, h = reduced["delta"], dict(memory)
        for name, d in moved.items():
            h[name] = memory[name] - a * share * d
        return {**reduced, "delta": {n: d - h[n] / a for n, d in moved.items()}}, h

    def tested(leaves: Leaves, memory: Memory) -> Leaves:
        return tree.add(leaves, tree.scale(memory["feddyn"], 1 / a))

    linear = inner_product("feddyn", lambda seen: tree.scale(seen.memory["feddyn"], -1.0))
    method = fedavg().replacing_reducer("feddyn", "delta", mean("uniform"))
    method = method.adding(
        terms=(linear, Term(owner="feddyn", fn=penalty)),
        stages=(Stage(owner="feddyn", fn=renew, memory=zeros),),
        server=(ServerStage(owner="feddyn", fn=settle, memory=zeros),),
    )
    return replace(method.replacing_evaluation("feddyn", tested=tested), plain_sgd=True)


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
