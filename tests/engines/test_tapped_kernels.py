"""Chains of layers in the middle of which somebody listens."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedloom as fl
from fedloom import frames, network
from fedloom.engines.vectorised import VectorisedEngine
from fedloom.gpu import fusions
from fedloom.types import Leaves
from fedloom.view import View
from tests.engines.test_kernels import DEVICE, Cohort, cuda, random, same, taken
from tests.engines.test_openings import TF32, as_compared
from tests.helpers import everything, gap

__all__ = ["as_compared", "taken"]  # fixtures


@cuda
def test_who_listens_to_a_relu_gets_what_it_returns(taken: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for size in (2, 3, 1):  # filled by windows, with a remainder, no windows
        taken.clear()
        net = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(size), nn.ReLU(inplace=True)
        )
        cohort = Cohort(nn.Sequential(*net, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)))
        same(cohort, monkeypatch, "0 1 2 3")
        assert not taken
    taken.clear()
    net = nn.Sequential(nn.BatchNorm2d(3), nn.ReLU6(), nn.MaxPool2d(1), nn.Flatten(), nn.Linear(240, 2))
    same(Cohort(net), monkeypatch, "1 2")
    assert taken == ["chained 1x1"]


def returned(
    built: network.Network, leaves: Leaves, mine: Leaves, x: Tensor, wanted: str, *, gradient: bool
) -> list[Tensor]:
    """What a model returns in evaluation mode for clients side by side, some leaves being their own, and features that are wanted."""
    built.want(frozenset(wanted.split()))

    def out(x: Tensor, mine: Leaves) -> tuple[Tensor, Leaves]:
        frame = frames.Frame(wanted=frozenset(wanted.split()))
        return built({**leaves, **mine}, x, frame, train=False), frame.features

    with torch.set_grad_enabled(gradient):
        y, features = torch.vmap(out)(x, mine)
    return [y, *features.values()]


@cuda
@pytest.mark.parametrize("method", ["fedavg + isr", "fedavg + isr(weights='adaptive')", "fedavg + isr(alpha=0.0)"])
def test_supervision_reads_summaries(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, to TF32, as where features are in memory, to which terms that read them go back."""
    data = fl.Federation.from_arrays([(rows(10, seed=k), rows(2, seed=9 + k)) for k in range(3)])
    net = partial(fl.models.convnet3, num_classes=3, in_channels=3, norm="none", width=4)
    called: list[bool] = []
    plain = fusions.opened_summed
    monkeypatch.setattr(
        fusions, "opened_summed", lambda *a, **o: (made := plain(*a, **o), called.append(made is not None))[0]
    )
    options: dict[str, Any] = {"rounds": 1, "epochs": 1, "batch_size": 5, "precision": "fp32", "progress": False}
    options |= {"engine": VectorisedEngine(), "device": DEVICE}
    ours = fl.fit(method, net, data, **options)
    assert any(called)
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["fedloom.plugins.isr"], "summary_of", str)
        called.clear()
        theirs = fl.fit(method, net, data, **options)
    assert not called
    assert gap(everything(ours), everything(theirs)) < TF32


def rows(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    return draw.normal(size=(count, 3, 8, 8)).astype("f4"), draw.integers(0, 3, count)


def test_who_reads_a_feature_that_others_want_summed_up_is_told_to_ask_for_it() -> None:
    view = View.__new__(View)
    view._out, view._features, view._summaries = torch.zeros(1), {}, {"act": (torch.zeros(1), torch.zeros(1))}
    with pytest.raises(LookupError, match=r"feature 'act' is only summed up: .* among its own taps"):
        view.feature("act")


@cuda
def test_of_a_module_that_is_called_twice_the_last_call_counts() -> None:
    """Its windows fill the map of the first call, which is summed up, and not that of the second."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2)), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Any:
            return self.head(self.body(x).mean((2, 3)) + self.body(x[..., 1:, 1:]).mean((2, 3)))

    built = Cohort(Twice()).net
    built.want(frozenset({"body.1"}))
    leaves = {n: torch.stack([v, v]) for n, v in built.start.items()}

    def out(x: Tensor, leaves: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor], Any]:
        frame = frames.Frame(wanted=frozenset({"body.1"}), summed=frozenset({"body.1"}))
        return built(leaves, x, frame, train=True), frame.features, frame.summaries

    _, features, summaries = torch.vmap(out)(random(2, 5, 3, 8, 8).detach(), leaves)
    assert features["body.1"].shape == (2, 5, 4, 5, 5)
    assert not summaries
