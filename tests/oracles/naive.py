"""Plain PyTorch, one client after another: the pieces from which the oracles are written.

Nothing here uses fedloom, except for the order of rows, which an oracle must share to be comparable.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedloom as fl
from fedloom import rng
from fedloom.clients import batches
from fedloom.rounds.sampling import sample
from fedloom.spec.parts import Phase

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


def initial(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """The model before round one, in float64."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(rng.key_of(seed, "init"))
        return make().double()


def rows(client: fl.data.ClientData) -> tuple[Tensor, Tensor]:
    """A client's training rows in float64."""
    assert isinstance(client.train.x, Tensor)
    return client.train.x.double(), client.train.y


def order(
    client: fl.data.ClientData,
    round: int,
    *,
    stream: str = "main",
    epochs: int = 2,
    batch_size: int = 4,
    bn: bool = False,
) -> list[Tensor]:
    """Row indices of each step."""
    made = batches.plan(
        Phase(),
        client.train.y.numpy(),
        rng.stream(0, "batches", client.id, round, stream),
        epochs=epochs,
        batch_size=batch_size,
        skip_single=bn,
    )
    return [torch.from_numpy(index) for (index,) in made]


def cohort(data: fl.Federation, round: int, size: int) -> list[fl.data.ClientData]:
    """The clients of a round."""
    return [data[i] for i in sample(0, round, data.ids, size)]


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The plain loss."""
    return F.cross_entropy(model(x), y)


def train(
    model: nn.Module,
    client: fl.data.ClientData,
    steps: Iterable[Tensor],
    loss: Loss = cross_entropy,
    *,
    params: Iterable[Tensor] | None = None,
    lr: float = 0.1,
) -> int:
    """Plain SGD over the given steps; the number of steps made."""
    x, y = rows(client)
    optimizer = torch.optim.SGD(list(params) if params is not None else model.parameters(), lr=lr)
    made = 0
    for index in steps:
        optimizer.zero_grad()
        loss(model, x[index], y[index]).backward()
        optimizer.step()
        made += 1
    return made


def clone(model: nn.Module) -> nn.Module:
    """A deep copy."""
    return copy.deepcopy(model)


def state(model: nn.Module) -> dict[str, Tensor]:
    """Leaves of a model, cut from any graph."""
    return {k: v.detach().clone() for k, v in model.state_dict().items()}


def average(states: list[dict[str, Tensor]], weights: list[float]) -> dict[str, Tensor]:
    """Weighted mean of states; integer buffers take the largest value."""
    total = sum(weights)
    found = {}
    for k, first in states[0].items():
        if first.is_floating_point():
            found[k] = sum((w / total) * s[k] for w, s in zip(weights, states, strict=True))
        else:
            found[k] = torch.stack([s[k] for s in states]).amax(0)
    return found


def square_distance(model: nn.Module, anchor: dict[str, Tensor]) -> Tensor:
    """``sum_l ||theta_l - anchor_l||^2`` over parameters."""
    return sum(((p - anchor[n]) ** 2).sum() for n, p in model.named_parameters())  # type: ignore[return-value]
