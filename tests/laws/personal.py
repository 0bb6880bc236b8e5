"""A problem that can be solved by hand: one client, one weight, ``f(w) = (w - target)^2 / 2``."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

import fedloom as fl
from tests.helpers import fit

HALF_SQUARE = fl.Task(lambda out, y: 0.5 * (out[:, 0] - y) ** 2, primary="loss", higher_is_better=False)


def parabola(method: str | fl.Method, start: float, target: float, *, rows: int = 2, **options: Any) -> fl.Result:
    """One round on the parabola with full batches and step ``lr``; the weight is the leaf ``0.weight``."""
    net = nn.Sequential(nn.Linear(1, 1, bias=False))
    nn.init.constant_(net[0].weight, start)  # type: ignore[arg-type]
    part = (np.ones((rows, 1), np.float32), np.full(rows, target, np.float32))
    data = fl.Federation.from_arrays([(part, part)])
    lr = options.pop("lr", 0.1)
    options = {"rounds": 1, "epochs": 1, "batch_size": "full", "task": HALF_SQUARE, "optimizer": fl.sgd(lr)} | options
    return fit(method, net, data, **options)


def value(leaves: dict[str, torch.Tensor], name: str = "0.weight") -> float:
    """The weight."""
    return float(leaves[name].reshape(()))
