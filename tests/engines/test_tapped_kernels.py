"""Chains of layers in the middle of which somebody listens: kernels that hand out what the ReLU returns, and take its gradient."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedloom as fl
from fedloom import chains, frames, kernels, network
from fedloom.engines.vectorised import VectorisedEngine
from fedloom.types import Leaves
from fedloom.view import View
from tests.engines.test_kernels import DEVICE, Cohort, compare, cuda, random, same, taken
from tests.helpers import everything, federation, fit, gap

__all__ = ["taken"]  # a fixture


@cuda
@pytest.mark.parametrize("window", [(2, 2), (2, 3)])
@pytest.mark.parametrize("six", [False, True], ids=["relu", "relu6"])
def test_activation_that_is_pooled_and_handed_out(window: tuple[int, int], six: bool) -> None:
    x = (random(2, 3, 4, 8, 6).detach() * 2).round().mul(2)  # ties, zeros, and windows below zero
    if not six:  # of which torch's gradients differ between devices
        x[0, 0, 0, 1, 0] = torch.nan
    x.requires_grad_()
    ours = torch.vmap(lambda x: kernels.acted_apart(x, window, six=six))(x)
    act = (F.relu6 if six else F.relu)(x)
    theirs = F.max_pool2d(act.flatten(0, 1), window).unflatten(0, (2, 3)), act
    weights = [torch.randn_like(y) for y in theirs]
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a.nan_to_num(-1), b.nan_to_num(-1))
    for used in ([0, 1], [0], [1]):
        found, expected = (
            torch.autograd.grad([y[i] for i in used], x, [weights[i] for i in used], retain_graph=True)[0]
            for y in (ours, theirs)
        )
        assert torch.allclose(found, expected)


@cuda
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("six", [False, True], ids=["relu", "relu6"])
def test_chains_whose_activation_is_handed_out(masked: bool, affine: bool, six: bool) -> None:
    clients, batch, channels = 2, 7, 3
    x = random(clients, batch, channels, 6, 4)
    weight, bias = (random(clients, channels), random(clients, channels)) if affine else (None, None)
    if weight is not None and six:
        weight = (weight * 4).detach().requires_grad_()  # some values beyond 6
    real = batch - 2 if masked else batch
    mask = (torch.arange(batch) < real).double().expand(clients, batch).contiguous().to(DEVICE) if masked else None
    packed = {k: v for k, v in {"x": x, "mask": mask, "w": weight, "b": bias}.items() if v is not None}
    made = torch.vmap(
        lambda p: kernels.chained_apart(p["x"], p.get("mask"), p.get("w"), p.get("b"), 1e-5, (3, 2), six=six)
    )(packed)
    theirs = torch.vmap(
        lambda p: kernels.normalised(p["x"], p.get("mask"), p.get("w"), p.get("b"), 1e-5)
    )(packed)  # fmt: skip
    act = (F.relu6 if six else F.relu)(theirs[0])
    pooled = F.max_pool2d(act.flatten(0, 1), (3, 2)).unflatten(0, (clients, batch))
    ours, expected = (torch.cat([y.flatten(2), a.flatten(2)], 2)[:, :real] for y, a in (made[:2], (pooled, act)))
    compare(ours, expected, [t for t in (x, weight, bias) if t is not None], 1e-9)
    assert all(torch.equal(a, b) for a, b in zip(made[2:], theirs[1:], strict=True))


@cuda
def test_who_listens_to_a_relu_gets_what_it_returns(taken: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for size, expected in (
        (2, ["acted_apart 2x2"]),
        (3, []),
        (1, []),
    ):  # filled by windows, with a remainder, no windows
        taken.clear()
        net = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(size), nn.ReLU(inplace=True)
        )
        cohort = Cohort(nn.Sequential(*net, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)))
        same(cohort, monkeypatch, "0 1 2 3")
        assert taken == expected
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
@pytest.mark.parametrize("relu", [nn.ReLU(inplace=True), nn.ReLU6()], ids=["relu", "relu6"])
def test_bias_of_a_convolution_that_all_clients_share(relu: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a gradient, it is added where windows are read."""
    net = nn.Sequential(
        nn.Conv2d(3, 5, 3, padding=1), nn.Identity(), relu, nn.MaxPool2d((2, 3)), nn.Flatten(), nn.Linear(60, 2)
    )
    leaves = {n: 4 * torch.randn_like(v) for n, v in Cohort(net).net.start.items()}
    x = 3 * random(2, 7, 3, 8, 10)

    def made(wanted: str = "", own: str = "", gradient: bool = False) -> list[Tensor]:
        mine = {n: torch.stack([v, v]) for n, v in leaves.items() if n in own.split()}
        return returned(Cohort(net).net, leaves, mine, x, wanted, gradient=gradient)

    given: list[bool] = []
    plain = kernels.acted_last

    def acted(*args: Any, **options: Any) -> Tensor:
        given.append(True)
        return plain(*args, **options)

    monkeypatch.setattr(kernels, "acted_last", acted)
    for wanted, own, gradient, expected in (
        ("", "", False, 1),
        ("3", "", False, 1),
        ("0", "", False, 0),
        ("1", "", False, 0),
        ("2", "", False, 0),
        ("", "0.bias", False, 0),
        ("", "", True, 0),
    ):
        given.clear()
        ours = made(wanted, own, gradient)
        with monkeypatch.context() as patch:
            patch.setattr(chains, "FUSE", False)
            theirs = made(wanted, own, gradient)
        assert sum(given) == expected, (wanted, own, gradient)
        assert len(ours) == len(theirs)
        assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(ours, theirs, strict=True))
        assert ours[0].std() > 0.1


def _summary(z: Tensor) -> tuple[Tensor, Tensor]:
    logs = F.log_softmax(z, 2)
    return z.flatten(3).mean(3), (logs.exp() * logs).sum(2).flatten(2).mean(2)


@cuda
@pytest.mark.parametrize("window", [(2, 2), (4, 3)])
@pytest.mark.parametrize("channels", [5, 70])
@pytest.mark.parametrize("six", [False, True], ids=["relu", "relu6"])
def test_activation_that_is_pooled_and_summed_up(window: tuple[int, int], channels: int, six: bool) -> None:
    x = random(2, 3, channels, 8, 12).detach().mul(4).requires_grad_()
    y, found = torch.vmap(lambda x: kernels.acted_summed(x, window, six=six))(x)
    act = (F.relu6 if six else F.relu)(x)
    pooled = F.max_pool2d(act.flatten(0, 1), window).unflatten(0, (2, 3))
    ours, theirs = (
        torch.cat([a.flatten(2), b[0], b[1][..., None]], 2) for a, b in ((y, found), (pooled, _summary(act)))
    )
    compare(ours, theirs, [x], 1e-9)


@cuda
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("affine", [True, False])
def test_chains_whose_activation_is_summed_up(masked: bool, affine: bool) -> None:
    clients, batch, channels = 2, 7, 3
    x = random(clients, batch, channels, 6, 4)
    weight, bias = (random(clients, channels), random(clients, channels)) if affine else (None, None)
    mask = (torch.arange(batch) < 5).double().expand(clients, batch).contiguous().to(DEVICE) if masked else None
    packed = {k: v for k, v in {"x": x, "mask": mask, "w": weight, "b": bias}.items() if v is not None}
    y, found, *moments = torch.vmap(
        lambda p: kernels.chained_summed(p["x"], p.get("mask"), p.get("w"), p.get("b"), 1e-5, (3, 2))
    )(packed)
    pooled, act, *others = torch.vmap(
        lambda p: kernels.chained_apart(p["x"], p.get("mask"), p.get("w"), p.get("b"), 1e-5, (3, 2))
    )(packed)
    real = 5 if masked else batch
    ours, theirs = (
        torch.cat([a.flatten(2), b[0], b[1][..., None]], 2)[:, :real] for a, b in ((y, found), (pooled, _summary(act)))
    )
    compare(ours, theirs, [t for t in (x, weight, bias) if t is not None], 1e-9)
    assert all(torch.equal(a, b) for a, b in zip(moments, others, strict=True))


@cuda
@pytest.mark.parametrize("norm", ["none", "bn_batch"])
@pytest.mark.parametrize("method", ["fedavg + isr", "fedavg + isr(weights='adaptive')", "fedavg + isr(alpha=0.0)"])
def test_supervision_reads_summaries(method: str, norm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same as where features are in memory, to which terms that read them go back."""
    data = fl.Federation.from_arrays([(rows(10, seed=k), rows(2, seed=9 + k)) for k in range(3)])
    net = partial(fl.models.convnet3, num_classes=3, in_channels=3, norm=norm, width=4)
    called: list[str] = []
    for name in ("acted_summed", "chained_summed"):
        fn = getattr(kernels, name)
        monkeypatch.setattr(kernels, name, lambda *a, fn=fn, name=name, **o: (called.append(name), fn(*a, **o))[1])
    options: dict[str, Any] = {"rounds": 1, "epochs": 1, "batch_size": 5, "precision": "fp64", "progress": False}
    options |= {"engine": VectorisedEngine(), "device": DEVICE}
    ours = fl.fit(method, net, data, **options)
    assert set(called) == {"chained_summed" if norm == "bn_batch" else "acted_summed"}
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["fedloom.plugins.isr"], "Summed", str)
        called.clear()
        theirs = fl.fit(method, net, data, **options)
    assert not called
    assert gap(everything(ours), everything(theirs)) < 1e-9


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


@cuda
@pytest.mark.parametrize("six", [False, True])
@pytest.mark.parametrize(
    ("shape", "window"), [((5, 3, 8, 10), (2, 3)), ((1, 1, 5, 4), (2, 2)), ((2, 33, 7, 7), (3, 1))]
)
def test_maps_whose_channels_lie_last(shape: tuple[int, ...], window: tuple[int, int], six: bool) -> None:
    """Any order in memory, a remainder that no window has, and NaN for NaN."""
    bias = random(shape[1]).detach()
    x = 4 * random(2, *shape).detach()
    x[0, 0, 0, 0, 1] = torch.nan
    relu = F.relu6 if six else F.relu
    theirs = torch.stack([F.max_pool2d(relu(client + bias[:, None, None]), window) for client in x])
    turned = x.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
    for each in (x, turned):
        ours = torch.vmap(lambda client: kernels.acted_last(client, bias, window, six=six))(each)
        assert torch.allclose(ours, theirs, atol=1e-12, equal_nan=True)
        assert ours.isnan().sum() == 1
        assert ours.permute(0, 1, 3, 4, 2).is_contiguous()


@cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_maps_of_short_types(dtype: torch.dtype) -> None:
    x, bias = random(2, 5, 3, 8, 10).detach().to(dtype), random(3).detach().to(dtype)
    ours = torch.vmap(lambda client: kernels.acted_last(client, bias, (2, 2)))(x)
    assert ours.dtype is dtype
    theirs = torch.stack([F.max_pool2d(F.relu(client + bias[:, None, None]), 2) for client in x])
    assert torch.allclose(ours, theirs, rtol=1 / 64)


class Viewing(nn.Module):
    """Flattens a pooled map, with ``view`` if asked, which needs the plain order in memory."""

    def __init__(self, flatten: str, pool: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 5, 3, padding=1), nn.ReLU(), pool)
        width = self.body(torch.zeros(1, 3, 8, 10)).numel()
        self.flatten, self.head = flatten, nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        z = self.body(x)
        made: Tensor = self.head(getattr(z, self.flatten)(len(z), -1))
        return made


@cuda
@pytest.mark.parametrize("pool", [nn.MaxPool2d(2), nn.MaxPool2d(3, 2)], ids=["apart", "overlapping"])
@pytest.mark.parametrize("flatten", ["view", "reshape"])
def test_channels_stay_last_unless_the_model_depends_on_the_order(
    flatten: str, pool: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    built, x, met = Cohort(Viewing(flatten, pool)).net, random(2, 7, 3, 8, 10).detach(), list[bool]()
    plain = kernels.acted_last

    def acted(*args: Any, **options: Any) -> Tensor:
        met.append(True)
        return plain(*args, **options)

    monkeypatch.setattr(kernels, "acted_last", acted)
    with torch.no_grad():
        ours = torch.vmap(lambda x: built(built.start, x, frames.Frame(), train=False))(x)
        monkeypatch.setattr(chains, "FUSE", False)
        theirs = torch.vmap(lambda x: built(built.start, x, frames.Frame(), train=False))(x)
    assert torch.allclose(ours, theirs, atol=1e-12)
    assert any(met) == (pool.kernel_size == 2)
    assert [part._chain_last for part in built.module.modules() if "_chain_last" in vars(part)] == [
        flatten == "reshape" and pool.kernel_size == 2
    ]


@cuda
def test_a_sweep_at_what_was_received_by_a_model_that_views() -> None:
    """Its filters are everybody's whatever else is tried."""
    data = federation((9, 14, 5), (3, 8, 10), classes=2)
    model = partial(Viewing, "view", nn.MaxPool2d(2))
    a, b = (fit("qfedavg", model, data, engine=e, rounds=2, device=DEVICE) for e in ("loop", VectorisedEngine()))
    assert gap(everything(a), everything(b)) < 1e-9
