"""Training loops as PFLlib runs them, written by hand in plain torch: nothing of fedloom is used here.

What is modelled: every client gets the model, evaluation comes before training (so round i is the model after i averages), means are
weighted by training rows and made of parameters alone, SGD, mini-batches from a shuffling loader that drops the last partial batch, and an
accuracy that counts all clients' test rows together.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

Pair = tuple[Tensor, Tensor]
Parts = Callable[[nn.Module], Iterable[nn.Parameter]]


@dataclass
class Options:
    """PFLlib's arguments, by its own names."""

    local_learning_rate: float = 0.005
    batch_size: int = 10
    local_epochs: int = 1
    global_rounds: int = 5
    mu: float = 0.0
    tau: float = 1.0
    plocal_epochs: int = 1
    fine_tuning_epochs: int = 10
    server_learning_rate: float = 1.0
    full: bool = False  # not PFLlib's: all rows in one batch, in order


@dataclass
class Client:
    """One client: its model (body ``base``, last layer ``head``) and its rows."""

    model: nn.Module
    train: Pair
    test: Pair
    kept: dict[str, object] = field(default_factory=dict)


def batches(client: Client, o: Options) -> Iterable[Pair]:
    """A pass over the rows."""
    if o.full:
        return [client.train]
    return DataLoader(TensorDataset(*client.train), o.batch_size, drop_last=True, shuffle=True)


def descend(
    client: Client,
    o: Options,
    parameters: Iterable[nn.Parameter],
    epochs: int,
    model: nn.Module | None = None,
    extra: Callable[[nn.Module, Tensor], Tensor] | None = None,
    pull: tuple[float, list[Tensor]] | None = None,
    shift: list[Tensor] | None = None,
) -> int:
    """Plain SGD on cross-entropy; returns the number of steps."""
    model, moved, steps = model or client.model, list(parameters), 0
    for _ in range(epochs):
        for x, y in batches(client, o):
            loss = F.cross_entropy(model(x), y)
            if extra is not None:
                loss = loss + extra(model, x)
            grads = torch.autograd.grad(loss, moved)
            with torch.no_grad():
                for i, (p, g) in enumerate(zip(moved, grads, strict=True)):
                    step = g if pull is None else g + pull[0] * (p - pull[1][i])
                    p -= o.local_learning_rate * (step if shift is None else step + shift[i])
            steps += 1
    return steps


def copied(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [p.detach().clone() for p in parameters]


def put(parameters: Iterable[nn.Parameter], values: list[Tensor]) -> None:
    with torch.no_grad():
        for p, v in zip(parameters, values, strict=True):
            p.copy_(v)


def everything(model: nn.Module) -> Iterable[nn.Parameter]:
    return model.parameters()


def base(model: nn.Module) -> Iterable[nn.Parameter]:
    return model.base.parameters()  # type: ignore[union-attr]


def head(model: nn.Module) -> Iterable[nn.Parameter]:
    return model.head.parameters()  # type: ignore[union-attr]


def nothing(model: nn.Module) -> Iterable[nn.Parameter]:
    return []


SHARED: dict[str, Parts] = {
    "FedAvg": everything, "FedProx": everything, "Ditto": everything, "MOON": everything, "SCAFFOLD": everything,
    "FedPer": base, "FedRep": base, "FedBABU": base, "LG-FedAvg": head, "Local": nothing,
}  # fmt: skip


def train(algorithm: str, client: Client, o: Options, c: list[Tensor]) -> None:
    """A client's round."""
    model = client.model
    received = copied(everything(model))
    if algorithm == "FedRep":
        descend(client, o, head(model), o.plocal_epochs)
        descend(client, o, base(model), o.local_epochs)
    elif algorithm == "FedBABU":
        descend(client, o, base(model), o.local_epochs)
    elif algorithm == "FedProx":
        descend(client, o, everything(model), o.local_epochs, pull=(o.mu, received))
    elif algorithm == "Ditto":
        own = client.kept.setdefault("own", copy.deepcopy(model))
        assert isinstance(own, nn.Module)
        descend(client, o, own.parameters(), o.plocal_epochs, model=own, pull=(o.mu, received))
        descend(client, o, everything(model), o.local_epochs)
    elif algorithm == "MOON":
        old, now = client.kept.get("old", copy.deepcopy(model)), copy.deepcopy(model)

        def contrast(m: nn.Module, x: Tensor) -> Tensor:
            z, far, near = m.base(x), old.base(x).detach(), now.base(x).detach()  # type: ignore[attr-defined,operator]
            a, b = (F.cosine_similarity(z, other) / o.tau for other in (near, far))
            return o.mu * torch.mean(-torch.log(a.exp() / (a.exp() + b.exp())))

        descend(client, o, everything(model), o.local_epochs, extra=contrast)
        client.kept["old"] = copy.deepcopy(model)
    elif algorithm == "SCAFFOLD":
        mine = client.kept.setdefault("c", [torch.zeros_like(v) for v in received])
        assert isinstance(mine, list)
        shift = [a - b for a, b in zip(c, mine, strict=True)]
        steps = descend(client, o, everything(model), o.local_epochs, shift=shift)
        scale = 1 / (steps * o.local_learning_rate)
        new = [
            b - a + scale * (w - p.detach()) for a, b, w, p in zip(c, mine, received, model.parameters(), strict=True)
        ]
        client.kept["dc"] = [n - b for n, b in zip(new, mine, strict=True)]
        client.kept["c"] = new
    else:
        descend(client, o, everything(model), o.local_epochs)


def accuracy(algorithm: str, clients: list[Client]) -> float:
    """Right answers over all clients' test rows."""
    right = total = 0
    for client in clients:
        own = client.kept.get("own", client.model) if algorithm == "Ditto" else client.model
        assert isinstance(own, nn.Module)
        with torch.no_grad():
            right += int((own(client.test[0]).argmax(1) == client.test[1]).sum())
        total += len(client.test[1])
    return right / total


def curve(
    algorithm: str, model: nn.Module, rows: list[tuple[Pair, Pair]], o: Options
) -> tuple[list[float], list[Client]]:
    """Accuracy before round 1, after it, ..., after the last; and the clients at the end, having received the last mean."""
    clients = [Client(copy.deepcopy(model), train, test) for train, test in rows]
    shared, sizes = SHARED[algorithm], [len(train[1]) for train, _ in rows]
    server = copied(shared(model))
    c = [torch.zeros_like(v) for v in server]
    found = []
    for i in range(o.global_rounds + 1):
        for client in clients:
            put(shared(client.model), server)
        found.append(accuracy(algorithm, clients))
        if i == o.global_rounds:
            break
        for client in clients:
            train(algorithm, client, o, c)
        sent = [copied(shared(client.model)) for client in clients]
        if algorithm == "SCAFFOLD":
            count, rate = len(clients), o.server_learning_rate
            server = [w + rate * sum(s[j] - w for s in sent) / count for j, w in enumerate(server)]
            c = [v + sum(k.kept["dc"][j] for k in clients) / count for j, v in enumerate(c)]  # type: ignore[index]
        else:
            total = sum(sizes)
            server = [
                sum((n / total * s[j] for n, s in zip(sizes, sent, strict=True)), torch.zeros_like(w))
                for j, w in enumerate(server)
            ]
    if algorithm == "FedBABU":
        for client in clients:
            descend(client, o, everything(client.model), o.fine_tuning_epochs)
        found[-1] = accuracy(algorithm, clients)
    return found, clients
