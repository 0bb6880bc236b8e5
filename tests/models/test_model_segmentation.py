"""Segmentation networks: label-sized outputs at every size, gradients, tap points, attention."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from fedloom import models
from fedloom.models.mobile_parts import attend
from fedloom.models.parts import DropPath
from fedloom.models.seaformer import AxialAttention
from fedloom.models.topformer import TokenAttention
from tests.models.cases import SEGMENTATION, params

SIZES = [
    pytest.param((180, 240), id="240x180"),
    pytest.param((360, 480), id="480x360", marks=pytest.mark.slow),
    pytest.param((512, 1024), id="1024x512", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", params(SEGMENTATION))
def test_forward_and_backward(case, size):
    torch.manual_seed(0)
    model = case.make()
    x = torch.randn(2, 3, *size)
    y = torch.randint(0, case.classes, (2, *size))
    out = model(x)
    assert out.shape == (2, case.classes, *size)
    loss = F.cross_entropy(out, y, ignore_index=255)
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("size", [(37, 61), (64, 1), (1, 90), (33, 32), (181, 97)])
@pytest.mark.parametrize("case", params(SEGMENTATION))
def test_output_has_the_size_of_the_label(case, size):
    model = case.make().eval()
    with torch.no_grad():
        assert model(torch.randn(1, 3, *size)).shape == (1, case.classes, *size)


@pytest.mark.parametrize("case", params(SEGMENTATION))
def test_training_learns_which_half_is_which(case):
    torch.manual_seed(0)
    model = case.make()
    x = torch.randn(4, 3, 64, 96)
    y = torch.zeros(4, 64, 96, dtype=torch.long)
    y[:, :, 48:] = 1
    x[:, 0, :, 48:] += 3
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    losses = []
    for _ in range(8):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize(
    ("name", "strides", "channels"),
    [
        ("deeplabv3plus_resnet18", [2, 4, 8, 16, 16, 16, 4], [64, 64, 128, 256, 512, 256, 304]),
        ("topformer_t", [4, 8, 16, 32, 64, 64, 8, 16, 32], [16, 32, 64, 96, 208, 208, 128, 128, 128]),
        ("topformer_s", [4, 8, 16, 32, 64, 64, 8, 16, 32], [24, 48, 96, 128, 296, 296, 192, 192, 192]),
        ("topformer_b", [4, 8, 16, 32, 64, 64, 8, 16, 32], [32, 64, 128, 160, 384, 384, 256, 256, 256]),
        ("seaformer_t", [4, 8, 16, 32, 32, 64, 64, 8, 8], [16, 32, 64, 128, 128, 160, 160, 64, 96]),
        ("seaformer_s", [4, 8, 16, 32, 32, 64, 64, 8, 8], [24, 48, 96, 160, 160, 192, 192, 96, 128]),
    ],
)
def test_tap_points_have_the_strides_and_widths_of_the_papers(name, strides, channels):
    model = getattr(models, name)().eval()
    shapes: list[torch.Size] = []
    for tap in model.tap_points:
        model.get_submodule(tap).register_forward_hook(lambda _m, _i, out: shapes.append(out.shape))
    with torch.no_grad():
        model(torch.randn(1, 3, 128, 192))
    assert [(s[1], s[2], s[3]) for s in shapes] == [
        (c, 128 // s, 192 // s) for c, s in zip(channels, strides, strict=True)
    ]


def test_the_head_gives_the_scores_before_upsampling():
    for case in SEGMENTATION:
        model = case.make().eval()
        assert isinstance(model.head, torch.nn.Conv2d)
        seen: list[torch.Tensor] = []
        model.head.register_forward_hook(lambda _m, _i, out, seen=seen: seen.append(out))
        out = model(case.batch(1, torch.float32))
        up = F.interpolate(seen[0], size=case.shape[1:], mode="bilinear", align_corners=False)
        assert torch.equal(out, up)


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_attention_equals_the_fused_one(scale):
    torch.manual_seed(0)
    heads, n = 3, 7
    q, k = torch.randn(2, 2, heads * 4, n).double()
    v = torch.randn(2, heads * 5, n).double()
    split = [t.unflatten(1, (heads, -1)).transpose(-2, -1) for t in (q, k, v)]
    fused = F.scaled_dot_product_attention(*split, scale=scale).transpose(-2, -1).flatten(1, 2)
    assert torch.allclose(attend(q, k, v, heads, scale), fused, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("scaled", "scale"), [(False, 1.0), (True, 0.25)])
def test_topformer_attention_is_scaled_only_on_request(scaled, scale):
    assert models.topformer_t(scaled=scaled).transformer[0].attention.scale == scale


def test_token_attention_starts_as_nothing():
    x = torch.randn(2, 24, 3, 4)
    assert TokenAttention(24, 2, "bn_track", scaled=False)(x).abs().max() == 0


def test_axial_attention_against_a_loop_over_heads_and_positions():
    torch.manual_seed(0)
    heads, key = 2, 4
    layer = AxialAttention(10, key, heads, "none").double()
    x = torch.randn(1, 10, 5, 6).double()
    with torch.no_grad():
        q, k, v = layer.q(x)[0], layer.k(x)[0], layer.v(x)[0]

        def along(branch, q, k, v):
            out = torch.zeros_like(v)
            q = q + F.interpolate(branch.position_q, size=q.shape[-1], mode="linear")[0]
            k = k + F.interpolate(branch.position_k, size=k.shape[-1], mode="linear")[0]
            for h in range(heads):
                qh, kh = q[h * key : (h + 1) * key], k[h * key : (h + 1) * key]
                vh = v[2 * h * key : 2 * (h + 1) * key]
                for i in range(q.shape[-1]):
                    weights = torch.stack([qh[:, i] @ kh[:, j] for j in range(k.shape[-1])]) / math.sqrt(key)
                    out[2 * h * key : 2 * (h + 1) * key, i] = vh @ weights.exp() / weights.exp().sum()
            return branch.project(out.clamp(0, 6)[None, :, :, None])[0, :, :, 0]

        rows = along(layer.rows, q.mean(2), k.mean(2), v.mean(2))[:, :, None]
        columns = along(layer.columns, q.mean(1), k.mean(1), v.mean(1))[:, None, :]
        gate = (layer.project((v + rows + columns).clamp(0, 6)[None])[0] / 6 + 0.5).clamp(0, 1)
        expected = gate * layer.detail(torch.cat([q, k, v])[None])[0]
        assert torch.allclose(layer(x)[0], expected, rtol=0, atol=1e-12)


def test_drop_path_rises_over_the_blocks_and_each_branch_has_its_own():
    model = models.topformer_t(drop_path=0.3)
    rates = [m.p for m in model.modules() if isinstance(m, DropPath)]
    assert rates == pytest.approx([0, 0, 0.1, 0.1, 0.2, 0.2, 0.3, 0.3])
    model = models.seaformer_t(drop_path=0.3)
    assert [m.p for m in model.modules() if isinstance(m, DropPath)] == pytest.approx([0, 0, 0.3, 0.3] * 2)
