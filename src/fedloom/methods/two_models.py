"""Methods that train a second, personal model beside the shared one."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fedloom import tree
from fedloom.methods.averaging import fedavg
from fedloom.objectives import quadratic
from fedloom.optim import sgd
from fedloom.record import Method
from fedloom.registry import recipe
from fedloom.slots import Copy, Extra, Phase, Receive, Send, ServerStage, Term
from fedloom.types import Batch, Cohort, Leaves, Message, Seen
from fedloom.view import View


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
        return {**reduced, "delta": tree.scale(reduced["delta"], beta)}, memory

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


@recipe(
    "0 <= alpha <= 1",
    paper="Deng et al., Adaptive Personalized Federated Learning, 2020, Algorithm 1 and eq. 10",
)
def apfl(alpha: float = 0.5, adaptive: bool = True) -> Method:
    """A client predicts with the mixture ``a v + (1 - a) w`` of a personal v and the shared w, and learns how much of each.

    The shared w is FedAvg's, bit for bit. ``v <- v - eta a grad f(a v + (1 - a) w)`` with the received w, on the stream
    of second copies; once a round ``a <- clip(a - eta <grad f(a v + (1 - a) w), v - w>, 0, 1)``, at the models and the
    batch with which the round begins. The round trains with the old a.

    Args:
        alpha: a at the start.
        adaptive: whether a is learnt; if not, 0 is FedAvg and 1 is local training (``local(stream="own")``).
    """

    def mixed(leaves: Leaves, own: Leaves, a: Tensor, names: tuple[str, ...]) -> Leaves:
        return {n: torch.lerp(leaves[n], own[n], a) for n in names}

    def mixture(leaves: Leaves, seen: Seen, a: Tensor) -> Leaves:
        names = seen.names(extra=False)
        found = mixed(leaves, {n: leaves[f"own/{n}"] for n in names}, a, names)
        return {f"own/{n}": value for n, value in found.items()}

    def predict(view: View, seen: Seen) -> Tensor:
        floating = tuple(n for n in seen.names(trainable=None, extra=False) if seen.specs[n].floating)
        own = view.of("own")
        return view.at(mixed(view.leaves, own, own["apfl:a"], floating)).output

    learn = Phase(
        name="mixing",
        copy="own",
        leaves="apfl:a",
        steps=1,
        view=lambda leaves, seen: mixture(leaves, seen, leaves["own/apfl:a"]),
        project=lambda leaves, seen: {"own/apfl:a": leaves["own/apfl:a"].clamp(0, 1)},
    )
    train = Phase(name="own", copy="own", view=lambda leaves, seen: mixture(leaves, seen, seen.start["own/apfl:a"]))
    method = fedavg()
    rest = method.schedule.round[1:]
    phases = (learn, train) if adaptive else (train,)
    share = Extra(
        owner="apfl",
        build=lambda structure, generator: {"a": torch.tensor(alpha, dtype=torch.float64)},
        kind="personal",
        role="none",
    )
    return (
        replace(method, schedule=replace(method.schedule, round=(Receive(), *phases, *rest)))
        .adding(copies=(Copy(owner="apfl", name="own"),), extras=(share,))
        .replacing_evaluation("apfl", predict=predict)
    )
