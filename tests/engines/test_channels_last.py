"""Convolutions of the loop engine compute with channels last where the model allows it; nothing else changes."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

import fedloom as fl
from fedloom.engines.choose_device import choose_device
from fedloom.network import functional, inspect_model
from tests.helpers import federation, fit, run_of


class Viewing(nn.Module):
    """Flattens with ``view``, which needs the plain order in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4 * 36, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x)
        return self.head(h.view(h.shape[0], -1))


def plain() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.2),
        nn.Flatten(),
        nn.Linear(36, 3),
    )


def made(model: nn.Module, precision: str = "fp32") -> functional.Network:
    device = choose_device("cpu", precision)
    return inspect_model.build(model, torch.zeros(2, 3, 8, 8), task="classification", device=device)


def test_which_models_do() -> None:
    assert made(plain()).channels_last
    assert not made(Viewing()).channels_last
    assert not made(plain(), "fp64").channels_last
    assert not made(nn.Sequential(nn.Flatten(), nn.Linear(192, 3))).channels_last


def test_looking_does_not_change_the_model() -> None:
    model = plain()
    net = made(model)
    for name, value in model.state_dict().items():
        assert torch.equal(net.start[name], value)
        assert net.start[name].is_contiguous()


def test_numbers_are_those_of_the_plain_order(monkeypatch) -> None:
    data = federation((20, 33), (3, 8, 8))
    options = {"rounds": 3, "epochs": 2, "batch_size": 8, "precision": "fp32", "engine": "loop"}
    options["optimizer"] = fl.sgd(0.05, momentum=0.9)
    fast = run_of(fit("fedper", partial(plain), data, **options))
    monkeypatch.setattr(inspect_model, "_runs_channels_last", lambda *_: False)
    slow = run_of(fit("fedper", partial(plain), data, **options))
    for name, value in fast.state.leaves.items():
        assert value.is_contiguous()
        assert torch.allclose(value, slow.state.leaves[name], atol=1e-5), name
    for client, state in fast.clients.items():
        for name, value in state.leaves.items():
            assert value.is_contiguous()
            assert torch.allclose(value, slow.clients[client].leaves[name], atol=1e-5)


def test_a_model_that_views_runs(tmp_path) -> None:
    data = federation((12, 9), (3, 8, 8))
    result = fl.fit("fedavg", Viewing, data, rounds=1, engine="loop", progress=False, out=tmp_path / "run")
    assert np.isfinite(result.history[-1]["train_loss"])
