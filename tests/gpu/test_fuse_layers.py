"""Layers that a container fuses: which ones, and that the results are those of the single layers."""

from __future__ import annotations

import copy
import sys
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedloom as fl
from fedloom.engines.vectorised import VectorisedEngine
from fedloom.models import convnet3
from fedloom.network import functional, layers, replace_layers
from fedloom.ops import forward_context
from fedloom.spec.view import View
from tests.gpu.helpers import DEVICE, TF32, kernels, random
from tests.helpers import everything, gap

pytest.importorskip("triton")
from fedloom.gpu import fuse_layers
from tests.gpu.cohorts import Cohort, compare_with_unfused, fused, without_fusion
from tests.gpu.test_conv_relu_pool import without_rounding

__all__ = ["fused", "without_rounding"]  # fixtures


@kernels
def test_layers_behind_kernels_may_work_in_place() -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.ReLU(inplace=True),
        nn.Conv2d(4, 200, 3, padding=1), nn.ReLU(inplace=True), nn.Flatten(),
    ).double()  # fmt: skip
    copies = [copy.deepcopy(net).to(DEVICE) for _ in range(2)]
    with torch.no_grad():
        for p in copies[1].parameters():
            p.mul_(1.5)
    replace_layers.prepare(net)
    leaves = {
        n: torch.stack([dict(c.named_parameters())[n].detach() for c in copies]) for n, _ in net.named_parameters()
    }
    leaves = {n: v.requires_grad_() for n, v in leaves.items()}
    buffers = {n: torch.stack([b.clone()] * 2).to(DEVICE) for n, b in net.named_buffers()}
    x = random(2, 6, 3, 8, 8).detach()

    def out(x: Tensor, leaves: dict[str, Tensor], buffers: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(net, {**leaves, **buffers}, (x,))

    with forward_context.entered(forward_context.Frame()):
        ours = torch.vmap(out)(x, leaves, buffers)
    theirs = torch.stack([c(part) for c, part in zip(copies, x, strict=True)])
    assert torch.allclose(ours, theirs, atol=1e-10)
    weight = torch.randn_like(theirs)
    found = torch.autograd.grad((ours * weight).sum(), list(leaves.values()))
    expected = torch.autograd.grad((theirs * weight).sum(), [p for c in copies for p in c.parameters()])
    for i, grad in enumerate(found):
        assert torch.allclose(grad, torch.stack([expected[i], expected[i + len(found)]]), atol=1e-8)
    assert torch.allclose(buffers["1.running_var"], torch.stack([c[1].running_var for c in copies]))


def test_cpu_layers_equal_those_of_torch() -> None:
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.MaxPool2d(2))
    x = torch.randn(2, 1, 6, 6)
    before = net(x)
    replace_layers.prepare(net)
    assert [type(m) for m in net] == [layers.CohortConv2d, nn.MaxPool2d]
    assert torch.equal(net(x), before)
    replace_layers.restore(net)
    assert [type(m) for m in net] == [nn.Conv2d, nn.MaxPool2d]


@kernels
def test_fusion_ends_at_layers_whose_output_is_read(fused: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    cohort = Cohort(convnet3(num_classes=3, in_channels=3, norm="bn_track", width=4))
    block = "body.block1"
    pooled = "norm_relu_pool 2x2"
    for wanted, expected in {
        "": [pooled],
        f"{block}.act": ["norm_relu_pool 1x1", "relu_pool 2x2"],
        f"{block}.pool {block}.conv z": [pooled],
        f"{block}.norm": ["relu_pool 2x2"],
        f"{block}.norm {block}.act {block}.pool": ["relu_pool 2x2"],
    }.items():
        fused.clear()
        compare_with_unfused(cohort, monkeypatch, wanted)
        assert fused == [*expected, pooled, pooled]
    fused.clear()
    compare_with_unfused(cohort, monkeypatch, "", mask=False)  # the hooks are registered, but no feature is wanted
    compare_with_unfused(cohort, monkeypatch, "", still=f"{block}.norm")
    compare_with_unfused(cohort, monkeypatch, "", train=False)
    assert fused == [pooled] * 3 + ["relu_pool 2x2", pooled, pooled] + ["relu_pool 2x2"] * 3
    heard: list[tuple[int, ...]] = []
    parts = dict(cohort.net.module.named_modules())
    handles = [
        parts[f"{block}.act"].register_forward_hook(lambda m, a, y: heard.append(tuple(y.shape))),
        parts["body.block2.pool"].register_forward_pre_hook(lambda m, a: heard.append(tuple(a[0].shape))),
    ]
    fused.clear()
    cohort()
    assert fused == ["norm_relu_pool 1x1", pooled]
    assert heard == [(5, 4, 8, 10), (5, 4, 4, 5)]
    for handle in handles:
        handle.remove()


@kernels
def test_in_place_shared_and_non_affine_layers(fused: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared = nn.ReLU()
            self.first = nn.Sequential(
                nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4, momentum=None), nn.ReLU6(inplace=True),
                nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2),
                nn.BatchNorm2d(4, affine=False), nn.ReLU(inplace=True), nn.BatchNorm2d(4), self.shared,
            )  # fmt: skip
            self.second = nn.Sequential(nn.ReLU(inplace=True), nn.MaxPool2d(2, stride=1))
            self.third = nn.Sequential(nn.ReLU(inplace=True), nn.MaxPool2d(2))
            self.head = nn.Linear(12, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x) - 0.5
            y = self.second(x - 0.1)
            z = self.third(x)  # which changes x
            return self.head(
                (y.mean((2, 3), keepdim=True) + z.mean((2, 3), keepdim=True) + x).flatten(2)[..., :3].flatten(1)
            )

    cohort = Cohort(Model())
    compare_with_unfused(cohort, monkeypatch)
    assert fused == ["norm_relu_pool 1x1", "relu_pool 2x2", "norm_relu_pool 1x1", "relu_pool 2x2"]


@kernels
def test_bfloat16_equals_unfused_layers(fused: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # Values close to 1, of which many are equal in so few bits: the first of them gets the gradient.
    x, weight, bias = (
        random(2, 4, 3, 6, 6).detach().bfloat16(),
        random(2, 3).float() / 50,
        1 + random(2, 3).float() / 50,
    )
    net = nn.Sequential(nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2))
    replace_layers.prepare(net)
    made = []
    for fuse in (True, False):
        if not fuse:
            without_fusion(monkeypatch)
        inputs = [t.detach().clone().requires_grad_() for t in (x, weight, bias)]
        buffers = {n: torch.stack([b.clone()] * 2).to(DEVICE) for n, b in net.named_buffers()}

        def out(x: Tensor, weight: Tensor, bias: Tensor, buffers: dict[str, Tensor]) -> Tensor:
            return torch.func.functional_call(net, {"0.weight": weight, "0.bias": bias, **buffers}, (x,))

        with forward_context.entered(forward_context.Frame()):
            y = torch.vmap(out)(*inputs, buffers)
        made.append((y, *torch.autograd.grad((y.float() ** 2).sum(), inputs), *buffers.values()))
    assert fused == ["norm_relu_pool 2x2"]
    assert made[0][0].dtype == torch.bfloat16
    assert torch.equal(made[0][0], made[1][0])
    for ours, theirs in zip(*made, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.allclose(ours, theirs, atol=1e-4, rtol=1e-2)


def test_copies_and_restored_containers() -> None:
    model = convnet3(num_classes=3, in_channels=3, norm="bn_track", width=4)
    kinds = [type(m) for m in model.modules()]
    x = torch.randn(2, 3, 8, 8)
    before = model(x)
    model.load_state_dict({k: torch.zeros_like(v) if "tracked" in k else v for k, v in model.state_dict().items()})
    replace_layers.prepare(model)
    fuse_layers.fuse_layers(model)
    other = copy.deepcopy(model)
    block = other.body.block1
    assert "forward" in vars(block)
    assert block.forward.__self__ is block
    assert "forward" not in vars(other.body)  # nothing to fuse
    assert torch.equal(model(x), before)
    assert torch.equal(other(x), before)
    replace_layers.restore(other)
    assert [type(m) for m in other.modules()] == kinds
    assert all(vars(m).keys() == vars(n).keys() for m, n in zip(other.modules(), convnet3().modules(), strict=True))
    assert torch.equal(other(x), before)


@kernels
def test_taps_of_a_relu_read_its_output(fused: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for size, pool in ((2, ["relu_pool 2x2"]), (3, ["relu_pool 3x3"]), (1, [])):  # 3 leaves a remainder
        fused.clear()
        net = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(size), nn.ReLU(inplace=True)
        )
        cohort = Cohort(nn.Sequential(*net, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)))
        compare_with_unfused(cohort, monkeypatch, "0 1 2 3")
        assert fused == pool
    fused.clear()
    net = nn.Sequential(nn.BatchNorm2d(3), nn.ReLU6(), nn.MaxPool2d(1), nn.Flatten(), nn.Linear(240, 2))
    compare_with_unfused(Cohort(net), monkeypatch, "1 2")
    assert fused == ["norm_relu_pool 1x1"]


@kernels
@pytest.mark.parametrize("relu", [nn.ReLU(), nn.ReLU(inplace=True), nn.ReLU6()], ids=["relu", "in place", "relu6"])
@pytest.mark.parametrize("front", [[], [nn.BatchNorm2d(3)]], ids=["relu first", "normalisation"])
def test_pooling_behind_a_tapped_relu_equals_that_of_torch(
    front: list[nn.Module], relu: nn.Module, fused: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many windows have equal maxima, many are 0 everywhere, and the tap has a loss of its own."""
    net = nn.Sequential(*front, relu, nn.MaxPool2d(2))
    replace_layers.prepare(net)
    fuse_layers.fuse_layers(net)
    name = str(len(front))
    net[len(front)].register_forward_hook(functional._Keeper(name))
    x = (random(2, 5, 3, 8, 10).detach() * 2).round().mul(2).requires_grad_()
    weights = {"weight": 4 * random(2, 3).detach(), "bias": random(2, 3).detach()} if front else {}
    leaves = {f"0.{n}": v.requires_grad_() for n, v in weights.items()}
    buffers = {n: torch.stack([b.clone()] * 2).to(DEVICE) for n, b in net.named_buffers()}
    results = []
    for plain in (False, True):
        with monkeypatch.context() as patch:
            if plain:
                without_fusion(patch)

            def out(x: Tensor, leaves: dict[str, Tensor], buffers: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
                frame = forward_context.Frame(wanted=frozenset({name}))
                with forward_context.entered(frame):
                    y = torch.func.functional_call(net, {**leaves, **buffers}, (x.clone(),))
                return y, frame.features[name]

            y, feature = torch.vmap(out)(x, leaves, buffers)
        weight, of_feature = (torch.arange(1.0, t.numel() + 1, device=DEVICE).view_as(t) for t in (y, feature))
        loss = (y * weight).sum() + (feature * of_feature).sum()
        results.append((y, feature, *torch.autograd.grad(loss, [x, *leaves.values()])))
    assert fused == [*(["norm_relu_pool 1x1"] if front else []), "relu_pool 2x2"]
    if front:
        assert all(torch.allclose(a, b, atol=1e-9) for a, b in zip(*results, strict=True))
    else:
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@kernels
def test_pooling_behind_other_hooks_is_that_of_torch(fused: list[str]) -> None:
    """A hook of the ReLU may replace its output by one with negative values, and the pooling reads that."""
    net = nn.Sequential(nn.ReLU(), nn.MaxPool2d(2))
    fuse_layers.fuse_layers(net)
    net[0].register_forward_hook(lambda layer, args, y: y - 1)
    x = random(2, 5, 3, 8, 10).detach()
    assert torch.equal(torch.vmap(net)(x), nn.MaxPool2d(2)(x.flatten(0, 1).relu() - 1).unflatten(0, (2, 5)))
    assert not fused


@kernels
@pytest.mark.parametrize("method", ["fedavg + isr", "fedavg + isr(weights='adaptive')", "fedavg + isr(alpha=0.0)"])
def test_isr_reads_summaries(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The results equal, to TF32, those of terms that read the features."""
    data = fl.Federation.from_arrays([(rows(10, seed=k), rows(2, seed=9 + k)) for k in range(3)])
    net = partial(fl.models.convnet3, num_classes=3, in_channels=3, norm="none", width=4)
    called: list[bool] = []
    plain = fuse_layers.conv_relu_pool_summary

    def counted(*args: Any, **options: Any) -> Any:
        outputs = plain(*args, **options)
        called.append(outputs is not None)
        return outputs

    monkeypatch.setattr(fuse_layers, "conv_relu_pool_summary", counted)
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


def test_reading_a_feature_of_which_only_a_summary_exists_raises() -> None:
    view = View.__new__(View)
    view._out, view._features, view._summaries = torch.zeros(1), {}, {"act": (torch.zeros(1), torch.zeros(1))}
    with pytest.raises(LookupError, match=r"feature 'act' is only summed up: .* among its own taps"):
        view.feature("act")


@kernels
def test_last_call_of_a_module_counts() -> None:
    """The windows fill the map of the first call only, so that only the first call has a summary."""

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
        frame = forward_context.Frame(wanted=frozenset({"body.1"}), summed=frozenset({"body.1"}))
        return built(leaves, x, frame, train=True), frame.features, frame.summaries

    _, features, summaries = torch.vmap(out)(random(2, 5, 3, 8, 8).detach(), leaves)
    assert features["body.1"].shape == (2, 5, 4, 5, 5)
    assert not summaries
