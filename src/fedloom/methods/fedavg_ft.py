"""FedAvg with fine-tuning: a client's model is the shared one after some local epochs."""

from __future__ import annotations

from fedloom.methods.fedavg import fedavg
from fedloom.methods.fine_tuning import Part, fine_tuned
from fedloom.spec.method import Method
from fedloom.spec.registry import recipe


@recipe(
    "finetune_epochs >= 0",
    paper="Wang et al., Federated Evaluation of On-device Personalization, 2019",
)
def fedavg_ft(finetune_epochs: int = 5, part: Part = "all") -> Method:
    """FedAvg; a client's own model is the shared one after some epochs on its own rows, made anew each time.

    ``theta_k = w - eta sum grad f_k`` over ``finetune_epochs`` epochs, with the run's optimiser. The shared model is
    FedAvg's, bit for bit.

    Args:
        finetune_epochs: epochs at evaluation; 0 is FedAvg.
        part: what is fine-tuned, ``"all"``, ``"head"`` or ``"body"``; with the head alone, the body's batch
            normalisation is in evaluation mode.
    """
    return fine_tuned(fedavg(), "fedavg_ft", finetune_epochs, part)
