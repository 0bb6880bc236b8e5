"""Outputs, gradients, tap points and blocks of every classification network."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedloom.models.parts import NORMS
from tests.models.cases import CASES, CLASSIFICATION, params


def called(model: nn.Module, names: list[str], x: torch.Tensor) -> list[str]:
    """The names among `names` in the order in which their modules run."""
    order: list[str] = []
    hooks = [
        model.get_submodule(name).register_forward_hook(lambda *_, name=name: order.append(name)) for name in names
    ]
    model(x)
    for hook in hooks:
        hook.remove()
    return order


@pytest.mark.parametrize("case", params(CLASSIFICATION))
def test_five_steps_lower_the_loss(case):
    torch.manual_seed(0)
    model = case.make()
    x, y = case.batch(16, torch.float32), torch.randint(0, max(case.classes, 2), (16,))

    def loss():
        out = model(x)
        assert out.shape == (16, case.classes)
        if case.classes == 1:
            return F.binary_cross_entropy_with_logits(out[:, 0], y.float())
        return F.cross_entropy(out, y)

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    first = loss()
    for _ in range(5):
        optimizer.zero_grad()
        loss().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
    assert loss() < first


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("case", params(CASES))
def test_normalisation_can_be_switched(case, norm):
    torch.manual_seed(0)
    model = case.make(norm=norm)
    out = model(case.batch(4, torch.float32))
    out.square().mean().backward()
    assert out.isfinite().all()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    kinds = {type(m) for m in model.modules()}
    batch = [m for m in model.modules() if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d)]
    assert (nn.GroupNorm in kinds) == (norm == "gn")
    assert bool(batch) == norm.startswith("bn")
    assert all(m.track_running_stats == (norm == "bn_track") for m in batch)
    assert bool(list(model.buffers())) == (norm == "bn_track")


@pytest.mark.parametrize("case", params(CASES))
def test_taps_run_once_each_in_the_order_given(case):
    model = case.make().eval()
    assert len(set(model.tap_points)) == len(model.tap_points) > 0
    assert called(model, list(reversed(model.tap_points)), case.batch(2, torch.float32)) == model.tap_points


@pytest.mark.parametrize("case", params(CLASSIFICATION))
def test_blocks_run_once_each_and_the_last_is_what_the_head_reads(case):
    model = case.make().eval()
    x = case.batch(2, torch.float32)
    assert called(model, model.blocks, x) == model.blocks
    seen: dict[str, torch.Tensor] = {}
    model.get_submodule(model.blocks[-1]).register_forward_hook(lambda _m, _i, out: seen.update(block=out))
    model.head.register_forward_pre_hook(lambda _m, inputs: seen.update(head=inputs[0]))
    model.head.register_forward_hook(lambda _m, _i, out: seen.update(out=out))
    output = model(x)
    pooled = seen["block"].mean((-2, -1)) if seen["block"].dim() == 4 else seen["block"]
    assert torch.equal(pooled, seen["head"])
    assert torch.equal(seen["out"], output)


@pytest.mark.parametrize(
    ("name", "blocks", "taps"),
    [("convnet3", 3, 6), ("convnet4", 4, 8), ("resnet18", 4, 9), ("resnet9", 5, 7), ("resnet20", 4, 10)],
)
def test_numbers_of_blocks_and_taps(name, blocks, taps):
    case = next(c for c in CLASSIFICATION if c.name == name)
    model = case.make()
    assert (len(model.blocks), len(model.tap_points)) == (blocks, taps)


def test_taps_of_a_conv_net_lie_on_both_sides_of_each_pool():
    case = next(c for c in CLASSIFICATION if c.name == "convnet3")
    model = case.make()
    sizes: list[tuple[int, ...]] = []
    for name in model.tap_points:
        model.get_submodule(name).register_forward_hook(lambda _m, _i, out: sizes.append(tuple(out.shape[1:])))
    model(torch.randn(2, 1, 28, 28))
    assert [s[1] for s in sizes] == [28, 14, 14, 7, 7, 3]
    assert all(s[0] == 64 for s in sizes)


@pytest.mark.parametrize("case", params(CASES))
def test_initialisation_follows_the_global_generator(case):
    torch.manual_seed(7)
    first = case.make().state_dict()
    torch.manual_seed(7)
    second = case.make().state_dict()
    torch.manual_seed(8)
    third = case.make().state_dict()
    assert all(torch.equal(first[k], second[k]) for k in first)
    assert any(not torch.equal(first[k], third[k]) for k in first)


def test_residual_weights_have_the_variance_of_he_et_al():
    torch.manual_seed(0)
    model = next(c for c in CLASSIFICATION if c.name == "resnet18").make()
    weight = model.stages.stage4[0].conv2.conv.weight.detach()
    assert float(weight.std()) == pytest.approx((2 / (9 * 512)) ** 0.5, rel=0.01)
