"""Ditto: FedAvg and a personal model per client, ``min_v f_k(v) + (lam/2) ||v - w||^2``."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from fedloom.methods.fedavg import fedavg
from fedloom.spec.method import Method
from fedloom.spec.parts import Copy, Phase, Send, Term
from fedloom.spec.registry import recipe
from fedloom.spec.seen import Seen
from fedloom.spec.terms import quadratic
from fedloom.spec.view import View
from fedloom.tasks.batch import Batch


@recipe(
    "lam >= 0",
    "personal_epochs >= 0",
    paper="Li et al., Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021, Algorithm 1",
    presets={"fedaims": {"lam": 0.1, "personal_epochs": 5}},
)
def ditto(lam: float = 0.1, personal_epochs: int | None = None) -> Method:
    """FedAvg, and beside it a personal model per client: ``min_v f_k(v) + (lam/2) ||v - w||^2``.

    The anchor is the model received. The personal model trains on a stream of its own, so the shared one is FedAvg's bit for
    bit.

    Args:
        lam: strength; 0 is local training.
        personal_epochs: epochs on the personal model; None for the run's.
    """

    def pull(view: View, batch: Batch, seen: Seen) -> Tensor:
        return lam * quadratic(view.trained, view.leaves, seen.received)

    method = fedavg()
    own = Phase(name="own", copy="own", epochs=personal_epochs)
    schedule = replace(method.schedule, round=(*method.schedule.round[:-1], own, Send()))
    return (
        replace(method, schedule=schedule)
        .adding(
            copies=(Copy(owner="ditto", name="own"),),
            terms=(Term(owner="ditto", fn=pull, copy="own"),) if lam else (),
        )
        .replacing_evaluation("ditto", copy="own")
    )
