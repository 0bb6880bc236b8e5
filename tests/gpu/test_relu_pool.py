"""[Batch normalisation,] ReLU and pooling of a cohort against torch's layers, client by client, in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.gpu.helpers import DEVICE, compare, kernels, random

pytest.importorskip("triton")
from fedloom.gpu import relu_pool


@kernels
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("window", [(1, 1), (2, 2), (3, 2)], ids=["no pooling", "2x2", "3x2 with a remainder"])
@pytest.mark.parametrize("relu6", [False, True], ids=["relu", "relu6"])
def test_norm_relu_pool(masked: bool, affine: bool, window, relu6: bool) -> None:
    clients, batch, channels, height, width = shape = (2, 7, 3, 11, 6)
    x = random(*shape)
    weight, bias = (random(clients, channels), random(clients, channels)) if affine else (None, None)
    if weight is not None and relu6:
        weight = (weight * 4).detach().requires_grad_()  # some values beyond 6
    real = batch - 2 if masked else batch
    mask = (torch.arange(batch) < real).double().expand(clients, batch).contiguous().to(DEVICE) if masked else None
    packed = {k: v for k, v in {"x": x, "mask": mask, "w": weight, "b": bias}.items() if v is not None}
    y, mean, var, count = torch.vmap(
        lambda p: relu_pool.norm_relu_pool(p["x"], p.get("mask"), p.get("w"), p.get("b"), 1e-5, window, relu6=relu6)
    )(packed)
    act = F.relu6 if relu6 else F.relu
    theirs = [
        F.batch_norm(x[i, :real], None, None, *((None, None) if weight is None else (weight[i], bias[i])), True)
        for i in range(clients)
    ]
    inputs = [t for t in (x, weight, bias) if t is not None]
    compare(y[:, :real], torch.stack([F.max_pool2d(act(v), window) for v in theirs]), inputs, 1e-9)
    flat = x[:, :real].transpose(1, 2).flatten(2)
    assert torch.allclose(mean, flat.mean(-1))
    assert torch.allclose(var, flat.var(-1, correction=0))
    assert torch.equal(count, torch.full_like(count, real * height * width))


@kernels
@pytest.mark.parametrize("shape", [(2, 70, 3, 20, 21), (2, 3, 4, 46, 50)], ids=["partial sums", "several tiles"])
def test_norm_relu_pool_on_large_maps(shape: tuple[int, ...]) -> None:
    x, weight, bias = random(*shape), random(2, shape[2]), random(2, shape[2])
    for window in ((1, 1), (2, 2)):
        y = torch.vmap(lambda *a, w=window: relu_pool.norm_relu_pool(a[0], None, a[1], a[2], 1e-5, w)[0])(
            x, weight, bias
        )
        theirs = [F.relu(F.batch_norm(x[i], None, None, weight[i], bias[i], True)) for i in range(2)]
        compare(y, torch.stack([F.max_pool2d(v, window) for v in theirs]), [x, weight, bias], 1e-9)


@kernels
def test_relu_pool() -> None:
    x = (random(2, 3, 4, 7, 9).detach() * 2).round().mul(2).requires_grad_()  # equal maxima, and windows below 0
    for window in ((2, 2), (2, 3)):
        for relu6, act in ((False, F.relu), (True, F.relu6)):
            ours = torch.vmap(lambda x, w=window, relu6=relu6: relu_pool.relu_pool(x, w, relu6=relu6))(x)
            compare(ours, F.max_pool2d(act(x.flatten(0, 1)), window).unflatten(0, (2, 3)), [x])
    with_nan = x.detach().clone()
    with_nan[0, 0, 0, 1, 0] = torch.nan
    with_nan.requires_grad_()
    ours = torch.vmap(lambda x: relu_pool.relu_pool(x, (2, 2)))(with_nan)
    theirs = F.max_pool2d(with_nan.flatten(0, 1).relu(), 2).unflatten(0, (2, 3))
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert ours[0, 0, 0, 0, 0].isnan()
    found, expected = (torch.autograd.grad(y.sum(), with_nan)[0] for y in (ours, theirs))
    assert torch.equal(found, expected)
