"""Methods whose clients fine-tune a shared model when it is used, or share only one part of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from fedloom.methods.averaging import fedavg
from fedloom.plugins.personal import personal
from fedloom.record import Method, compose
from fedloom.registry import recipe
from fedloom.slots import Phase, Receive, Rule

Part = Literal["all", "head", "body"]


def fine_tuned(method: Method, owner: str, epochs: int, part: Part) -> Method:
    """The method whose clients train some epochs before their model is evaluated or used; the result is discarded."""
    if not epochs:
        return method
    still = "body" if part == "head" else None
    tune = Phase(name="finetune", leaves=part, epochs=epochs, stream="finetune", thaw=True, eval_norm=still)
    return method.replacing_schedule(owner, adapt=(Receive(), tune))


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


@recipe(
    "pretrain_rounds >= 0",
    paper="Liang et al., Think Locally, Act Globally: Federated Learning with Local and Global Representations, 2020, Algorithm 1",
)
def lg_fedavg(pretrain_rounds: int = 0) -> Method:
    """A personal body under a shared head, trained together; the head is averaged.

    ``psi <- psi + sum_k p_k (psi_k - psi)``, psi the head. Only the head travels.

    Args:
        pretrain_rounds: rounds of FedAvg on the whole model first (the paper starts from such a model).
    """
    method = compose(fedavg(), personal("body"))
    return replace(fedavg(), then=(pretrain_rounds, method)) if pretrain_rounds else method
