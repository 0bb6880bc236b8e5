"""FedBABU: train the body under a fixed random head; fine-tune for evaluation."""

from __future__ import annotations

from fedloom.methods.fedavg import fedavg
from fedloom.methods.fine_tuning import Part, fine_tuned
from fedloom.spec.method import Method
from fedloom.spec.parts import Rule
from fedloom.spec.registry import recipe


@recipe(
    "finetune_epochs >= 0",
    paper="Oh et al., FedBABU: Toward Enhanced Representation for Federated Image Classification, ICLR 2022, Algorithm 1",
    presets={"original": {"finetune_epochs": 5}, "fedaims": {"finetune_epochs": 5}},
)
def fedbabu(finetune_epochs: int = 5, part: Part = "all") -> Method:
    """Only the body learns, under a head that stays at one common random start; clients fine-tune when they are evaluated.

    ``phi <- phi + sum_k p_k (phi_k - phi)``, phi the body; the head is neither trained nor sent. A client's own model is
    the averaged body and the common head after ``finetune_epochs`` epochs on its own rows, made anew each time.

    Args:
        finetune_epochs: epochs at evaluation; 0 evaluates the averaged body under the initial head.
        part: what is fine-tuned, ``"all"`` (the paper), ``"head"`` or ``"body"``.
    """
    frozen = Rule(owner="fedbabu", pattern="head", kind="frozen")
    return fine_tuned(fedavg().adding(rules=(frozen,)), "fedbabu", finetune_epochs, part)
