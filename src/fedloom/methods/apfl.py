"""APFL: clients predict with a learned mixture ``a v + (1 - a) w`` of a personal v and the shared w."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fedloom.methods.fedavg import fedavg
from fedloom.spec.method import Method
from fedloom.spec.parts import Copy, Extra, Phase, Receive
from fedloom.spec.registry import recipe
from fedloom.spec.seen import Seen
from fedloom.spec.view import View
from fedloom.tensors import Leaves


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
