"""Chains of layers in the middle of which somebody listens: kernels that hand out what the ReLU returns, and take its gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom import frames, kernels, layers
from tests.engines.test_kernels import DEVICE, Cohort, compare, cuda, random, same, taken

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


@cuda
@pytest.mark.parametrize("relu", [nn.ReLU(inplace=True), nn.ReLU6()], ids=["relu", "relu6"])
def test_bias_of_a_convolution_that_all_clients_share(relu: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a gradient, it is added where windows are read."""
    net = nn.Sequential(nn.Conv2d(3, 5, 3, padding=1), relu, nn.MaxPool2d((2, 3)), nn.Flatten(), nn.Linear(60, 2))
    leaves = {n: 4 * torch.randn_like(v) for n, v in Cohort(net).net.start.items()}
    x = 3 * random(2, 7, 3, 8, 10)

    def made(wanted: str = "", own: str = "", gradient: bool = False) -> list[Tensor]:
        built = Cohort(net).net
        built.want(frozenset(wanted.split()))
        mine = {n: torch.stack([v, v]) for n, v in leaves.items() if n in own.split()}

        def out(x: Tensor, mine: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
            frame = frames.Frame(wanted=frozenset(wanted.split()))
            return built({**leaves, **mine}, x, frame, train=False), frame.features

        with torch.set_grad_enabled(gradient):
            y, features = torch.vmap(out)(x, mine)
        return [y, *features.values()]

    given: list[bool] = []
    plain = kernels.acted

    def acted(*args: Any, **options: Any) -> Tensor:
        given.append("bias" in options)
        return plain(*args, **options)

    monkeypatch.setattr(kernels, "acted", acted)
    for wanted, own, gradient, expected in (
        ("", "", False, 1),
        ("2", "", False, 1),
        ("0", "", False, 0),
        ("1", "", False, 0),
        ("", "0.bias", False, 0),
        ("", "", True, 0),
    ):
        given.clear()
        ours = made(wanted, own, gradient)
        with monkeypatch.context() as patch:
            patch.setattr(layers, "FUSE", False)
            theirs = made(wanted, own, gradient)
        assert sum(given) == expected, (wanted, own, gradient)
        assert len(ours) == len(theirs)
        assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(ours, theirs, strict=True))
        assert ours[0].std() > 0.1
