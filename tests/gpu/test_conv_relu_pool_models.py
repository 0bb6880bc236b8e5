"""Models whose first layers are fused: which layers, and that training and methods equal those of single layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fedloom as fl
from fedloom.engines.choose_device import choose_device
from fedloom.engines.vectorised import VectorisedEngine
from fedloom.network import inspect_model
from tests.gpu.helpers import DEVICE, TF32, coarse, kernels, numbers
from tests.helpers import everything, federation, fit, gap

pytest.importorskip("triton")
from fedloom.gpu import fuse_layers
from tests.gpu.cohorts import run_stacked, without_fusion
from tests.gpu.test_conv_relu_pool import without_rounding

__all__ = ["without_rounding"]  # a fixture


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool, object]]:
    """Return a list of the calls from now on: function, whether it returned a result, argument ``pooled``."""
    found: list[tuple[str, bool, object]] = []

    def watch(name: str) -> None:
        plain = getattr(fuse_layers, name)

        def recorded(*args: Any, **options: Any) -> Any:
            y = plain(*args, **options)
            found.append((name, y is not None, options.get("pooled")))
            return y

        monkeypatch.setattr(fuse_layers, name, recorded)

    for name in ("conv_relu_pool", "conv_relu_pool_summary"):
        watch(name)
    return found


@kernels
def test_which_layers_are_fused(calls: list[tuple[str, bool, object]], monkeypatch: pytest.MonkeyPatch) -> None:
    """With personal and with shared filters; layers whose inner outputs are read are not fused."""
    torch.manual_seed(0)
    body = nn.Conv2d(3, 5, 3, padding=1), nn.Identity(), nn.ReLU(), nn.MaxPool2d(2)
    net = nn.Sequential(*body, nn.Conv2d(5, 4, 3), nn.ReLU6(), nn.MaxPool2d((1, 2)), nn.Flatten(), nn.Linear(16, 2))
    built = inspect_model.build(net, numbers(2, 3, 8, 14), task="classification", device=choose_device(DEVICE, "fp32"))
    x, leaves = numbers(2, 7, 3, 8, 14), {n: v.to(DEVICE) for n, v in built.start.items()}

    def made(wanted: str, own: bool, gradient: bool) -> list[Tensor]:
        mine = {n: torch.stack([v, v]).requires_grad_(gradient) for n, v in leaves.items()} if own else {}
        return run_stacked(built, leaves, mine, x, wanted, gradient=gradient)

    for wanted, own, gradient, expected in (
        ("", False, False, 2),
        ("", True, False, 2),
        ("3", True, False, 2),
        ("0", True, False, 1),
        ("2", False, False, 1),
        ("5", True, False, 1),
        ("", True, True, 1),  # the input of the second convolution has a gradient
    ):
        calls.clear()
        ours = made(wanted, own, gradient)
        with monkeypatch.context() as patch:
            without_fusion(patch)
            theirs = made(wanted, own, gradient)
        assert [name for name, fused, _ in calls if fused] == ["conv_relu_pool"] * expected
        for a, b in zip(ours, theirs, strict=True):
            assert torch.allclose(a, b, rtol=TF32, atol=TF32 * 10)


class RecordedCasts(TorchDispatchMode):
    """Record the shapes of tensors that are cast to float16."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and made.dtype is torch.float16:
            self.shapes.append(tuple(made.shape))
        return made


@kernels
def test_filters_are_cast_once() -> None:
    """Also those of a layer that is not fused."""
    net = coarse_model(nn.Conv2d(6, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 2))
    built = inspect_model.build(net, numbers(2, 3, 8, 10), task="classification", device=choose_device(DEVICE, "fp32"))
    built.autocast = torch.float16
    mine = {n: torch.stack([v, v]).to(DEVICE).requires_grad_() for n, v in built.start.items()}
    with RecordedCasts() as casts:
        run_stacked(built, built.start, mine, numbers(2, 7, 3, 8, 10), "", gradient=True)
    for name in ("0.weight", "3.weight"):
        assert casts.shapes.count(tuple(mine[name].shape)) == 1


@kernels
def test_methods_with_passes_without_gradient(
    calls: list[tuple[str, bool, object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """MOON's two other models and FedMAP's sweep equal single layers, to TF32."""
    data = federation((9, 14, 5), (3, 8, 10), classes=2)

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 2))

    options = {
        "engine": VectorisedEngine(),
        "rounds": 2,
        "device": DEVICE,
        "precision": "fp32",
        "evaluate": {"every": 0},
    }
    for method in ("moon", "fedmap"):
        found = []
        for fuse in (True, False):
            calls.clear()
            with monkeypatch.context() as patch:
                if not fuse:
                    without_fusion(patch)
                found.append(everything(fit(method, model, data, **options)))
            assert bool(calls) == fuse
        assert gap(*found) < TF32


def coarse_model(*behind: nn.Module) -> nn.Module:
    """Return a model whose first layers are fused, with weights whose products are exact."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), *behind)
    for leaf in net.parameters():
        leaf.data = (16 * leaf.data).round() / 16
    return net


def train_one_epoch(method: Any, model: Callable[[], nn.Module]) -> Any:
    rows = [(coarse(n, 3, 8, 10).cpu().numpy(), np.arange(n) % 2) for n in (9, 14, 5)]
    data = fl.Federation.from_arrays([(own, own) for own in rows])
    options = {"engine": VectorisedEngine(), "rounds": 1, "epochs": 1, "batch_size": 16, "evaluate": {"every": 0}}
    return everything(fit(method, model, data, **options, device=DEVICE, precision="fp32"))


@kernels
@pytest.mark.parametrize(
    ("method", "function"),
    [("fedavg", "conv_relu_pool"), ("fedavg + isr", "conv_relu_pool_summary"), ("fedper", "conv_relu_pool")],
)
def test_training(
    method: str, function: str, calls: list[tuple[str, bool, object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step equals that of single layers, to TF32; ISR requests a summary of the ReLU."""

    def model() -> nn.Module:
        return coarse_model(nn.Conv2d(6, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(80, 2))

    found = []
    for fuse in (True, False):
        calls.clear()
        with monkeypatch.context() as patch:
            if not fuse:
                without_fusion(patch)
            found.append(train_one_epoch(method, model))
        assert ((function, True) in [call[:2] for call in calls]) == fuse
    assert gap(*found) < TF32


class Doubled(nn.Module):
    """A user's layer that works in place."""

    def forward(self, x: Tensor) -> Tensor:
        x *= 2
        return x


@kernels
@pytest.mark.parametrize("overwritten", [False, True], ids=["unchanged", "overwritten"])
def test_summary_of_the_pooling(
    overwritten: bool, calls: list[tuple[str, bool, object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backward pass reads the pooled map, which the next layer may overwrite."""

    def model() -> nn.Module:
        return coarse_model(Doubled() if overwritten else nn.Identity(), nn.Flatten(), nn.Linear(120, 2))

    method = fl.compose(fl.fedavg(), fl.isr(points=("1", "2")))
    found = []
    for fuse in (True, False):
        with monkeypatch.context() as patch:
            if not fuse:
                without_fusion(patch)
            found.append(train_one_epoch(method, model))
    assert {pooled for name, _, pooled in calls if name == "conv_relu_pool_summary"} == {True}
    assert gap(*found) < TF32
