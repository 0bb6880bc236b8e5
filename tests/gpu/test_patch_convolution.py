"""Convolution of a cohort over patches against torch's, client by client, in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.gpu.helpers import compare, kernels, random

pytest.importorskip("triton")
from fedloom.gpu import conv_shapes, patch_convolution

PLAIN = (1, 1), (0, 0), (1, 1)


@kernels
@pytest.mark.parametrize("outputs", [4, 200], ids=["one product per image", "one product"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation"),
    [((5, 5), (1, 1), (0, 0), (1, 1)), ((3, 2), (2, 1), (1, 2), (1, 2)), ((1, 1), (2, 2), (0, 0), (1, 1))],
)
def test_values_and_gradients(outputs: int, bias: bool, kernel: tuple[int, int], stride, padding, dilation) -> None:
    x, w = random(3, 5, 7, 11, 10), random(3, outputs, 7, *kernel)
    b = random(3, outputs) if bias else None
    inputs = [t for t in (x, w, b) if t is not None]
    geometry = stride, padding, dilation

    def ours(*tensors: Tensor) -> Tensor:
        y = patch_convolution.patch_convolution(*tensors, *([] if bias else [None]), geometry)
        assert y is not None
        return y

    theirs = torch.stack([F.conv2d(x[i], w[i], None if b is None else b[i], *geometry) for i in range(3)])
    compare(torch.vmap(ours)(*inputs), theirs, inputs)


@kernels
def test_backward_pass_computes_large_patches_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patch_convolution, "SAVED_BYTES", 0)
    x, w = random(2, 3, 2, 6, 6), random(2, 4, 2, 3, 3)
    ours = torch.vmap(lambda x, w: patch_convolution.patch_convolution(x, w, None, ((1, 1), (1, 1), (1, 1))))(x, w)
    compare(ours, torch.stack([F.conv2d(x[i], w[i], padding=1) for i in range(2)]), [x, w])


@kernels
@pytest.mark.parametrize(
    ("outputs", "kernel", "gradient", "expected"),
    [
        (4, 3, True, False),  # as many outputs as inputs: above the limit
        (5, 3, True, True),  # more outputs: below the larger limit
        (5, 3, False, False),  # which holds for training only
        (4, 5, True, True),  # a large filter
    ],
)
def test_limits(outputs: int, kernel: int, gradient: bool, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    size = 4 * kernel * kernel * 3 * (9 - kernel) ** 2 * 8  # bytes of a client's patches
    for name, limit in {
        "FEW_CLIENTS": 2,
        "FEW_CLIENTS_PATCH_BYTES": size,
        "LARGE_FILTER_PATCH_BYTES": size,
        "PATCH_BYTES": size - 1,
    }.items():
        monkeypatch.setattr(patch_convolution, name, limit)
    x, w, supported = random(2, 3, 4, 8, 8), random(2, outputs, 4, kernel, kernel), list[bool]()

    def one(x: Tensor, w: Tensor) -> Tensor:
        y = patch_convolution.patch_convolution(x, w, None, PLAIN)
        supported.append(y is not None)
        return F.conv2d(x, w) if y is None else y

    with torch.set_grad_enabled(gradient):
        ours = torch.vmap(one)(x, w)
    assert supported == [expected]
    assert torch.allclose(ours, torch.stack([F.conv2d(x[i], w[i]) for i in range(2)]))


@kernels
def test_empty_batch_is_left_to_torch() -> None:
    w, found = random(2, 4, 2, 3, 3), list[Tensor | None]()
    torch.vmap(lambda x, w: found.append(patch_convolution.patch_convolution(x, w, None, PLAIN)) or x)(
        random(2, 3, 2, 6, 6)[:, :0], w
    )
    assert found == [None]


@pytest.mark.parametrize("size", [2, (2, 2), [2, 2]])
def test_pool_window_accepts_integers_tuples_and_lists(size: object) -> None:
    assert conv_shapes.pool_window(nn.MaxPool2d(size)) == (2, 2)  # type: ignore[arg-type]
