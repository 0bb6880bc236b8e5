"""FedDyn: FedAvg with a dynamic regulariser, ``f_k(theta) - <g_k, theta> + (a/2) ||theta - w||^2``."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from fedloom import tensors
from fedloom.methods.fedavg import fedavg
from fedloom.spec.leaves import Facts
from fedloom.spec.method import Method
from fedloom.spec.parts import ServerStage, Stage, Term
from fedloom.spec.reducers import mean
from fedloom.spec.registry import recipe
from fedloom.spec.seen import Cohort, Seen
from fedloom.spec.terms import inner_product, quadratic
from fedloom.spec.view import View
from fedloom.tasks.batch import Batch
from fedloom.tensors import Leaves, Memory, Message


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
        return tensors.zeros_like(facts.travelling(extra=None))

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
        return tensors.add(leaves, tensors.scale(memory["feddyn"], 1 / a))

    linear = inner_product("feddyn", lambda seen: tensors.scale(seen.memory["feddyn"], -1.0))
    method = fedavg().replacing_reducer("feddyn", "delta", mean("uniform"))
    method = method.adding(
        terms=(linear, Term(owner="feddyn", fn=penalty)),
        stages=(Stage(owner="feddyn", fn=renew, memory=zeros),),
        server=(ServerStage(owner="feddyn", fn=settle, memory=zeros),),
    )
    return replace(method.replacing_evaluation("feddyn", tested=tested), plain_sgd=True)
