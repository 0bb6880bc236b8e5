"""Methods that keep a part of the model, or a whole one, at the client."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from fedloom.methods.averaging import fedavg
from fedloom.objectives import quadratic
from fedloom.plugins.personal import personal
from fedloom.record import Method, compose
from fedloom.registry import recipe
from fedloom.slots import Copy, Phase, Receive, Rule, Send, Term
from fedloom.types import Batch, Seen
from fedloom.view import View


@recipe(paper="Arivazhagan et al., Federated Learning with Personalization Layers, 2019", plugin="personal")
def fedper() -> Method:
    """A shared body and a personal head, trained together; the body is averaged."""
    return compose(fedavg(), personal("head"))


@recipe(
    "head_epochs >= 0",
    paper="Collins et al., Exploiting Shared Representations for Personalized Federated Learning, ICML 2021",
    presets={"original": {"head_epochs": 10}, "fedaims": {"head_epochs": 5}},
)
def fedrep(head_epochs: int | None = None) -> Method:
    """A shared body and a personal head, trained in turn: first the head alone, then the body alone.

    While the head trains, the body's batch normalisation is in evaluation mode, so that the body does not move at all.

    Args:
        head_epochs: epochs on the head; None for the run's.
    """
    head = Phase(name="head", leaves="head", epochs=head_epochs, stream="head", eval_norm="body")
    body = Phase(name="body", leaves="body")
    return fedper().replacing_schedule("fedrep", round=(Receive(), head, body, Send()))


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


@recipe(paper="Li et al., FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, ICLR 2021")
def fedbn(weight: str = "n") -> Method:
    """FedAvg with personal batch normalisation, found by type: affine parameters and running statistics stay.

    A model without batch normalisation makes it FedAvg bit for bit, with a warning.

    Args:
        weight: ``"n"`` or ``"uniform"`` (the authors' code).
    """
    return fedavg(weight).adding(rules=(Rule(owner="fedbn", pattern="norm", kind="personal", optional=True),))
