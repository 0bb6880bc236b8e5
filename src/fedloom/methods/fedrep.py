"""FedRep: a shared body and a personal head, trained in turn."""

from __future__ import annotations

from fedloom.methods.fedper import fedper
from fedloom.spec.method import Method
from fedloom.spec.parts import Phase, Receive, Send
from fedloom.spec.registry import recipe


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
