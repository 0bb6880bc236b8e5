"""FedAvg on ``f(w - a grad f(w; D1); D2)``: clients learn a model from which one step of size a fits them."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from fedloom import tensors
from fedloom.methods.fedavg import fedavg
from fedloom.spec.method import Method
from fedloom.spec.optimizer import sgd
from fedloom.spec.parts import Phase, Receive, Sampler, Send, Term
from fedloom.spec.registry import recipe
from fedloom.spec.seen import Seen
from fedloom.spec.terms import data_term
from fedloom.spec.view import View
from fedloom.tasks.batch import Batch


@recipe(
    "a >= 0",
    "b > 0",
    paper="Fallah et al., Personalized Federated Learning with Theoretical Guarantees, NeurIPS 2020, Algorithm 1",
    presets={"original": {"a": 0.01, "b": 0.001}, "exact": {"exact": True}, "short": {"a": 0.1}},
)
def peravg(a: float = 0.01, b: float | None = None, exact: bool = False) -> Method:
    """FedAvg on ``f(w - a grad f(w; D1); D2)``: clients learn a model from which one step of size a fits them.

    Steps use pairs of mini-batches D1, D2: ``w' = w - a g(w; D1)``, then ``w <- w - b g(w'; D2)`` (first order), or
    with the factor ``I - a H(w; D1)`` before g (exact). A left-over mini-batch is dropped, a lone one is halved. Running
    statistics are those of D2. A client is evaluated after one step of size a on its first mini-batch; the shared
    model is untouched. That step is all the personalisation there is: in runs of tens of rounds the paper's a = 0.01
    hardly differs from FedAvg, and ``preset="short"`` takes 0.1.

    Args:
        a: inner step; 0 is FedAvg on the D2 batches.
        b: outer step; None for the run's optimiser.
        exact: whether second derivatives are used.
    """

    def ahead(view: View, batch: Batch, seen: Seen) -> Tensor:
        if not a:
            return view.at(batch=batch.pair).loss()
        g = view.gradient(lambda other: other.loss(), view.trained)
        if not exact:
            g = {n: v.detach() for n, v in g.items()}
        moved = {n: view.leaves[n] - v for n, v in tensors.scale(g, a).items()}
        return view.at(moved, batch=batch.pair).loss()

    pairs = Phase(sampler=Sampler(group=2), optimizer=None if b is None else sgd(lr=b))
    one = Phase(name="adapt", steps=1, stream="adapt", optimizer=sgd(lr=a))
    return (
        fedavg()
        .replacing_data(
            Term(owner="peravg", fn=ahead, role="data", phases=("main",)),
            replace(data_term(), phases=("adapt",)),
        )
        .replacing_schedule("peravg", round=(Receive(), pairs, Send()), adapt=(Receive(), one) if a else (Receive(),))
    )
