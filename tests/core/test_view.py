"""Views of a model on a batch."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

import fedloom as fl
from fedloom import tasks
from fedloom.engines.choose_device import choose_device
from fedloom.network import inspect_model
from fedloom.network.bound_method import bind
from fedloom.spec.view import View
from fedloom.tasks.batch import Batch


def test_a_fixed_view_has_no_gradient() -> None:
    """Nor has one that is made of it; what it returns is the same."""
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        bound = bind(
            fl.method("fedavg"),
            inspect_model.build(model, torch.zeros(2, 4), task="classification", device=choose_device("cpu", "fp32")),
            tasks.named("classification"),
        )
    none: Any = None
    leaves = {name: value.clone().requires_grad_() for name, value in bound.start.items()}
    view = View(bound, leaves, Batch(torch.randn(6, 4), torch.zeros(6, dtype=torch.long)), none)
    fixed = view.at(fixed=True)
    again = fixed.at({name: value * 2 for name, value in leaves.items()})
    assert view.output.requires_grad
    assert torch.equal(view.output, fixed.output)
    assert not fixed.output.requires_grad
    assert not again.output.requires_grad
    assert not torch.equal(again.output, fixed.output)
    z = torch.randn(6, 5)
    assert view.head(z).requires_grad
    assert not fixed.head(z).requires_grad
    with torch.no_grad():
        assert not view.at().output.requires_grad
    assert torch.is_grad_enabled()
