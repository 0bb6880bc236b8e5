"""Moreau envelopes: the personal model is ``theta_k ~ argmin f_k(theta) + (lam/2) ||theta - w_k||^2``."""

from __future__ import annotations

from torch import Tensor

from fedloom import tensors
from fedloom.methods.fedavg import fedavg
from fedloom.spec.method import Method
from fedloom.spec.optimizer import sgd
from fedloom.spec.parts import Copy, Phase, Receive, Send, ServerStage, Term
from fedloom.spec.registry import recipe
from fedloom.spec.seen import Cohort, Seen
from fedloom.spec.terms import quadratic
from fedloom.spec.view import View
from fedloom.tasks.batch import Batch
from fedloom.tensors import Leaves, Message


@recipe(
    "lam >= 0",
    "K >= 1",
    "R >= 1",
    "eta >= 0",
    "eta_p > 0",
    "beta > 0",
    paper="Dinh et al., Personalized Federated Learning with Moreau Envelopes, NeurIPS 2020, Algorithm 1",
    presets={
        "original": {"lam": 15.0, "K": 5, "R": 20, "eta": 0.005, "eta_p": 0.09, "beta": 1.0},
        "short": {"lam": 1.0, "eta": 1.0},
    },
)
def pfedme(
    lam: float = 15.0,
    K: int = 5,
    R: int | None = None,
    eta: float = 0.005,
    eta_p: float | None = None,
    beta: float = 1.0,
) -> Method:
    """Moreau envelopes: the personal model is ``theta_k ~ argmin f_k(theta) + (lam/2) ||theta - w_k||^2``.

    On each mini-batch K steps ``theta <- theta - eta_p (grad f + lam (theta - w_k))``, then ``w_k <- w_k - eta lam (w_k -
    theta)``. Theta starts the round at the received w and runs on from batch to batch. The server takes ``w <- (1 -
    beta) w + beta mean_k w_k``, all clients alike. Only theta sees rows, so w_k's running statistics are theta's.

    At the paper's lam theta stays within ``|grad f| / 15`` of w_k, and w_k moves as SGD with step eta: for 800 rounds. Runs of tens of
    rounds want ``preset="short"``, lam and eta 1. The inner step must be below ``2 / lam``.

    Args:
        lam: strength of the pull.
        K: inner steps on a mini-batch.
        R: mini-batches of a round; None for the run's epochs.
        eta: outer step, constant.
        eta_p: inner step; None for the run's optimiser.
        beta: the server's step; 1 is the plain mean.
    """

    def pull(view: View, batch: Batch, seen: Seen) -> Tensor:
        return lam * quadratic(view.trained, view.leaves, view.of("main"))

    def begin(start: Leaves, seen: Seen) -> Leaves:
        return {f"own/{n}": start[n] for n in seen.names(trainable=None)}

    def outer(leaves: Leaves, seen: Seen) -> Leaves:
        moved = {n: leaves[n] - eta * lam * (leaves[n] - leaves[f"own/{n}"]) for n in seen.names()}
        return moved | {n: leaves[f"own/{n}"] for n in seen.names(trainable=False)}

    def damp(reduced: Message, memory: Leaves, cohort: Cohort) -> tuple[Message, Leaves]:
        return {**reduced, "delta": tensors.scale(reduced["delta"], beta)}, memory

    inner = Phase(
        name="own",
        copy="own",
        steps=R,
        repeat=K,
        after=outer,
        optimizer=None if eta_p is None else sgd(lr=eta_p),
    )
    return (
        fedavg("uniform")
        .replacing_schedule("pfedme", round=(Receive(), inner, Send()), adapt=(Receive(rule=False),))
        .replacing_receive("pfedme", begin)
        .adding(
            copies=(Copy(owner="pfedme", name="own"),),
            terms=(Term(owner="pfedme", fn=pull, copy="own"),) if lam else (),
            server=(ServerStage(owner="pfedme", fn=damp),) if beta != 1 else (),
        )
        .replacing_evaluation("pfedme", copy="own")
    )
