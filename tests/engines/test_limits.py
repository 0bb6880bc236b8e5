"""Which of a cohort's convolutions lay their patches out, and pooling layers as users write them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.gpu import cohort, geometry
from tests.engines.test_kernels import cuda, random


@cuda
@pytest.mark.parametrize(
    ("outputs", "kernel", "gradient", "laid"),
    [
        (4, 3, True, False),  # as many outputs as inputs: above the usual limit
        (5, 3, True, True),  # more: below the larger one
        (5, 3, False, False),  # whose reason are gradients
        (4, 5, True, True),  # a large filter
    ],
)
def test_limits_of_patches(
    outputs: int, kernel: int, gradient: bool, laid: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 4 * kernel * kernel * 3 * (9 - kernel) ** 2 * 8  # bytes of a client's patches
    for name, limit in {"FEW": 2, "FEW_PATCHES": size, "LARGE_PATCHES": size, "PATCH_BYTES": size - 1}.items():
        monkeypatch.setattr(cohort, name, limit)
    x, w, met = random(2, 3, 4, 8, 8), random(2, outputs, 4, kernel, kernel), list[bool]()

    def one(x: Tensor, w: Tensor) -> Tensor:
        y = cohort.convolved(x, w, None, (1, 1), (0, 0), (1, 1))
        met.append(y is not None)
        return F.conv2d(x, w) if y is None else y

    with torch.set_grad_enabled(gradient):
        ours = torch.vmap(one)(x, w)
    assert met == [laid]
    assert torch.allclose(ours, torch.stack([F.conv2d(x[i], w[i]) for i in range(2)]))


@cuda
def test_a_batch_of_no_rows_is_torchs() -> None:
    w, found = random(2, 4, 2, 3, 3), list[Tensor | None]()
    torch.vmap(lambda x, w: found.append(cohort.convolved(x, w, None, (1, 1), (0, 0), (1, 1))) or x)(
        random(2, 3, 2, 6, 6)[:, :0], w
    )
    assert found == [None]


@pytest.mark.parametrize("size", [2, (2, 2), [2, 2]])
def test_windows_as_they_are_written(size: object) -> None:
    assert geometry.window_of(nn.MaxPool2d(size)) == (2, 2)  # type: ignore[arg-type]
