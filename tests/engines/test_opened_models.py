"""Models whose first layers are opened: where they are, and that training and methods are as layer by layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fedloom as fl
from fedloom import network
from fedloom.engines.vectorised import VectorisedEngine
from fedloom.gpu import chains, fusions
from tests.engines.test_kernels import DEVICE, cuda
from tests.engines.test_openings import TF32, as_compared, coarse, numbers
from tests.engines.test_tapped_kernels import returned
from tests.helpers import everything, federation, fit, gap

__all__ = ["as_compared"]  # a fixture


@pytest.fixture
def met(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool, object]]:
    """Of each call from now on which function it was, whether a kernel served it, and whether the pooling was to be summed up."""
    found: list[tuple[str, bool, object]] = []

    def watch(name: str) -> None:
        plain = getattr(fusions, name)

        def noted(*args: Any, **options: Any) -> Any:
            y = plain(*args, **options)
            found.append((name, y is not None, options.get("pooled")))
            return y

        monkeypatch.setattr(fusions, name, noted)

    for name in ("opened", "opened_summed"):
        watch(name)
    return found


@cuda
def test_where_a_model_is_opened(met: list[tuple[str, bool, object]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless somebody listens in between; with own filters and with shared ones."""
    torch.manual_seed(0)
    body = nn.Conv2d(3, 5, 3, padding=1), nn.Identity(), nn.ReLU(), nn.MaxPool2d(2)
    net = nn.Sequential(*body, nn.Conv2d(5, 4, 3), nn.ReLU6(), nn.MaxPool2d((1, 2)), nn.Flatten(), nn.Linear(16, 2))
    built = network.build(net, numbers(2, 3, 8, 14), task="classification", device=DEVICE)
    x, leaves = numbers(2, 7, 3, 8, 14), {n: v.to(DEVICE) for n, v in built.start.items()}

    def made(wanted: str, own: bool, gradient: bool) -> list[Tensor]:
        mine = {n: torch.stack([v, v]).requires_grad_(gradient) for n, v in leaves.items()} if own else {}
        return returned(built, leaves, mine, x, wanted, gradient=gradient)

    for wanted, own, gradient, expected in (
        ("", False, False, 2),
        ("", True, False, 2),
        ("3", True, False, 2),
        ("0", True, False, 1),
        ("2", False, False, 1),
        ("5", True, False, 1),
        ("", True, True, 1),  # what the first layers return has a gradient
    ):
        met.clear()
        ours = made(wanted, own, gradient)
        with monkeypatch.context() as patch:
            patch.setattr(chains, "FUSE", False)
            theirs = made(wanted, own, gradient)
        assert [name for name, served, _ in met if served] == ["opened"] * expected
        for a, b in zip(ours, theirs, strict=True):
            assert torch.allclose(a, b, rtol=TF32, atol=TF32 * 10)


class Turned(TorchDispatchMode):
    """Shapes of what is turned into 16 bits."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and made.dtype is torch.float16:
            self.shapes.append(tuple(made.shape))
        return made


@cuda
def test_filters_are_turned_into_the_type_of_autocast_once() -> None:
    """Also those of a layer that is not opened after all."""
    net = opening(nn.Conv2d(6, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 2))
    built = network.build(net, numbers(2, 3, 8, 10), task="classification", device=DEVICE)
    built.autocast = torch.float16
    mine = {n: torch.stack([v, v]).to(DEVICE).requires_grad_() for n, v in built.start.items()}
    with Turned() as turned:
        returned(built, built.start, mine, numbers(2, 7, 3, 8, 10), "", gradient=True)
    for name in ("0.weight", "3.weight"):
        assert turned.shapes.count(tuple(mine[name].shape)) == 1


@cuda
def test_methods_that_open_what_has_no_gradient(
    met: list[tuple[str, bool, object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """MOON's two other models, FedMAP's sweep: as layer by layer, to TF32."""
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
            met.clear()
            monkeypatch.setattr(chains, "FUSE", fuse)
            found.append(everything(fit(method, model, data, **options)))
            assert bool(met) == fuse
        assert gap(*found) < TF32


def opening(*behind: nn.Module) -> nn.Module:
    """A model whose first layers are opened, with weights of which products are exact."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), *behind)
    for leaf in net.parameters():
        leaf.data = (16 * leaf.data).round() / 16
    return net


def after_an_epoch(method: Any, model: Callable[[], nn.Module]) -> Any:
    rows = [(coarse(n, 3, 8, 10).cpu().numpy(), np.arange(n) % 2) for n in (9, 14, 5)]
    data = fl.Federation.from_arrays([(own, own) for own in rows])
    options = {"engine": VectorisedEngine(), "rounds": 1, "epochs": 1, "batch_size": 16, "evaluate": {"every": 0}}
    return everything(fit(method, model, data, **options, device=DEVICE, precision="fp32"))


@cuda
@pytest.mark.parametrize(
    ("method", "through"), [("fedavg", "opened"), ("fedavg + isr", "opened_summed"), ("fedper", "opened")]
)
def test_training_with_opened_layers(
    method: str, through: str, met: list[tuple[str, bool, object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step is as layer by layer, to TF32; also with ISR, which has what the ReLU returns summed up."""

    def model() -> nn.Module:
        return opening(nn.Conv2d(6, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(80, 2))

    found = []
    for fuse in (True, False):
        met.clear()
        monkeypatch.setattr(chains, "FUSE", fuse)
        found.append(after_an_epoch(method, model))
        assert ((through, True) in [call[:2] for call in met]) == fuse
    assert gap(*found) < TF32


class Doubled(nn.Module):
    """Works in place, as a user's own layer may."""

    def forward(self, x: Tensor) -> Tensor:
        x *= 2
        return x


@cuda
@pytest.mark.parametrize("overwritten", [False, True], ids=["lasting", "overwritten"])
def test_poolings_are_summed_up_on_the_way(
    overwritten: bool, met: list[tuple[str, bool, object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the pooling returned is read again on the way back, also where a layer behind it overwrites that."""

    def model() -> nn.Module:
        return opening(Doubled() if overwritten else nn.Identity(), nn.Flatten(), nn.Linear(120, 2))

    method = fl.compose(fl.fedavg(), fl.isr(points=("1", "2")))
    found = []
    for fuse in (True, False):
        monkeypatch.setattr(chains, "FUSE", fuse)
        found.append(after_an_epoch(method, model))
    assert {pooled for name, _, pooled in met if name == "opened_summed"} == {True}
    assert gap(*found) < TF32
