"""What the oracles of personalised methods share: rows, the order of mini-batches, gradients in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import fedloom as fl
from fedloom import rng
from fedloom.clients import batches
from fedloom.spec.parts import Phase
from tests.helpers import federation, fit, mlp

Params = dict[str, Tensor]
LR, EPOCHS, BATCH, ROUNDS = 0.1, 2, 4, 3
HEAD = ("2.weight", "2.bias")
BODY = ("0.weight", "0.bias")


class World:
    """A tiny federation, a two-layer network in float64, and the settings of ``tests.helpers.fit``."""

    def __init__(self, sizes: tuple[int, ...] = (9, 14, 5, 6), classes: int = 3, seed: int = 1) -> None:
        self.data = federation(sizes, classes=classes)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.net: nn.Module = mlp(classes=classes)().double()
        self.classes = classes
        self.ids = [c.id for c in self.data]
        self.x = {c.id: c.train.x.double() for c in self.data}  # type: ignore[union-attr]
        self.y = {c.id: c.train.y for c in self.data}
        self.n = {i: len(self.y[i]) for i in self.ids}

    def start(self) -> Params:
        return {k: v.detach().clone() for k, v in self.net.named_parameters()}

    def fit(self, method: str | fl.Method, **options: Any) -> fl.Result:
        return fit(method, self.net, self.data, **({"cohort": 3, "optimizer": fl.sgd(LR)} | options))

    def steps(self, client: str, round: int, stream: str = "main", **phase: Any) -> list[tuple[Tensor, ...]]:
        """Row indices of each step of a phase, as the package orders them."""
        phase.setdefault("epochs", EPOCHS)
        made = batches.plan(
            Phase(**phase),
            self.y[client].numpy(),
            rng.stream(0, "batches", client, round, stream),
            epochs=EPOCHS,
            batch_size=BATCH,
            skip_single=False,
        )
        return [tuple(torch.from_numpy(rows) for rows in step) for step in made]

    def z(self, p: Params, x: Tensor) -> Tensor:
        return torch.tanh(x @ p["0.weight"].T + p["0.bias"])

    def logits(self, p: Params, x: Tensor) -> Tensor:
        return functional_call(self.net, p, (x,))

    def loss(self, p: Params, client: str, rows: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(p, self.x[client][rows]), self.y[client][rows])

    def sgd(
        self,
        p: Params,
        client: str,
        steps: list[tuple[Tensor, ...]],
        loss: Callable[[Params, Tensor], Tensor] | None = None,
        names: tuple[str, ...] | None = None,
        lr: float = LR,
    ) -> Params:
        """Plain SGD over some steps on some parameters."""
        value = loss or (lambda q, rows: self.loss(q, client, rows))
        for (rows,) in steps:
            g = grads(lambda q, rows=rows: value(q, rows), p, names)  # type: ignore[misc]
            p = {k: v - lr * g[k] if k in g else v for k, v in p.items()}
        return p


def grads(fn: Callable[[Params], Tensor], p: Params, names: tuple[str, ...] | None = None) -> Params:
    """Gradient of a scalar function of parameters."""
    chosen = names or tuple(p)
    leaves = {k: v.detach().clone().requires_grad_(k in chosen) for k, v in p.items()}
    found = torch.autograd.grad(fn(leaves), [leaves[k] for k in chosen], allow_unused=True)
    return {k: torch.zeros_like(p[k]) if g is None else g for k, g in zip(chosen, found, strict=True)}


def mean(models: list[Params], weights: list[float], names: tuple[str, ...] | None = None) -> Params:
    """Weighted mean of models."""
    total = sum(weights)
    return {k: sum(w / total * m[k] for m, w in zip(models, weights, strict=True)) for k in names or models[0]}  # type: ignore[misc]


def close(a: Params, b: Params, tolerance: float = 1e-10) -> bool:
    """Whether two models agree on the names of ``a``."""
    return all(float((v - b[k]).abs().max()) <= tolerance for k, v in a.items())


def taking_part(result: fl.Result) -> list[tuple[int, list[str]]]:
    """The rounds and who took part in each."""
    return [(r["round"], r["clients"]) for r in result.history]
