"""Depthwise convolutions of a cohort against torch's, client by client."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.engines.vectorised import VectorisedEngine
from tests.gpu.helpers import DEVICE, compare, kernels, random
from tests.helpers import everything, federation, fit, gap

pytest.importorskip("triton")
from fedloom.gpu import depthwise_convolution as depthwise
from fedloom.gpu import patch_convolution

PLAIN = (1, 1), (0, 0), (1, 1)


@kernels
@pytest.mark.parametrize("own", [True, False], ids=["per client", "shared"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("size", "kernel", "parameters"),
    [
        ((5, 4, 9, 7), (3, 3), ((1, 1), (1, 1), (1, 1))),
        ((3, 7, 12, 11), (5, 2), ((2, 1), (2, 0), (1, 3))),
        ((2, 1, 3, 4), (1, 1), ((2, 3), (0, 0), (1, 1))),
        ((70, 2, 33, 40), (3, 3), ((2, 2), (1, 1), (2, 2))),  # partial sums
    ],
)
def test_values_and_gradients(size, kernel, parameters, bias: bool, own: bool) -> None:
    x, w = random(2, *size), random(*((2,) if own else ()), size[1], 1, *kernel)
    b = (random(2, size[1]) if own else random(size[1])) if bias else None
    inputs = [t for t in (x, w, b) if t is not None]

    def ours(*tensors: Tensor) -> Tensor:
        y = depthwise.depthwise_convolution(*tensors, *([] if bias else [None]), parameters)
        assert y is not None
        return y

    axes = (0, *([0] if own else [None]) * (len(inputs) - 1))
    stride, padding, dilation = parameters
    theirs = torch.stack(
        [
            F.conv2d(x[i], w[i] if own else w, b if b is None or not own else b[i], stride, padding, dilation, size[1])
            for i in range(2)
        ]
    )
    compare(torch.vmap(ours, axes)(*inputs), theirs, inputs, 1e-10)


@kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_float32_and_bfloat16(dtype: torch.dtype) -> None:
    x, w, b = (
        t.detach().to(dtype).requires_grad_() for t in (random(2, 3, 4, 8, 8), random(2, 4, 1, 3, 3), random(2, 4))
    )
    ours = torch.vmap(lambda x, w, b: depthwise.depthwise_convolution(x, w, b, ((1, 1), (1, 1), (1, 1))))(x, w, b)
    wide = [t.detach().double().requires_grad_() for t in (x, w, b)]
    theirs = torch.stack([F.conv2d(*client, padding=1, groups=4) for client in zip(*wide, strict=True)])
    near = {"rtol": 1 / 32, "atol": 1 / 8} if dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-4}
    assert ours.dtype is dtype
    assert torch.allclose(ours.double(), theirs, **near)
    for a, b_ in zip(torch.autograd.grad(ours.sum(), [x, w, b]), torch.autograd.grad(theirs.sum(), wide), strict=True):
        assert a.dtype is dtype
        assert torch.allclose(a.double(), b_, **near)


@kernels
def test_conditions(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[bool] = []

    def served(x: Tensor, w: Tensor) -> bool:
        def one(x: Tensor, w: Tensor) -> Tensor:
            found.append(depthwise.depthwise_convolution(x, w, None, PLAIN) is not None)
            return x

        torch.vmap(one)(x, w)
        return found[-1]

    x, w = random(2, 3, 4, 8, 8), random(2, 4, 1, 3, 3)
    assert served(x, w)
    assert not served(x, w.float())
    assert not served(x[:1], w[:1])  # one client alone
    assert not served(x, random(2, 4, 1, 9, 3))  # larger than the picture
    assert not served(x, random(2, 4, 1, 8, 8))  # 64 values
    assert not served(x[:, :0], w)
    assert not served(random(2, 3, 5, 8, 8), w)  # another number of channels
    monkeypatch.setattr(depthwise, "MAX_VALUES", 3 * 4 * 8 * 8 - 1)
    assert not served(x, w)  # too many values for 32-bit indices
    monkeypatch.undo()
    assert depthwise.depthwise_convolution(x[0], w[0], None, PLAIN) is None  # outside of vmap


@kernels
def test_model_equals_the_loop_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch computes groups of two, several filters per channel and padding by name."""
    data = federation((9, 14, 5), (4, 8, 10), classes=2)
    channels: list[int] = []
    plain = depthwise.depthwise_convolution

    def counted(x: Tensor, w: Tensor, *others: object) -> Tensor | None:
        y = plain(x, w, *others)  # type: ignore[arg-type]
        channels.append(len(w) if y is not None else 0)
        return y

    monkeypatch.setattr(patch_convolution, "depthwise_convolution", counted)

    def model() -> nn.Module:
        torch.manual_seed(0)
        layers = (
            nn.Conv2d(4, 4, 3, padding=1, groups=4),
            nn.BatchNorm2d(4),
            nn.ReLU6(),
            nn.Conv2d(4, 6, 3, stride=2, groups=2),
            nn.Conv2d(6, 6, (1, 3), padding="same", groups=6),
            nn.Conv2d(6, 12, 1, groups=6, bias=False),
            nn.Conv2d(12, 12, 3, groups=12, bias=False),
        )
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 2))

    options = {"rounds": 2, "device": DEVICE}
    a = everything(fit("fedavg", model, data, engine="loop", **options))
    channels.clear()
    b = everything(fit("fedavg", model, data, engine=VectorisedEngine(), **options))
    assert gap(a, b) < 1e-9
    assert set(channels) >= {4, 12}
    assert set(channels) <= {0, 4, 12}
