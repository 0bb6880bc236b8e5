"""Interpolation as products with matrices, which CUDA uses, against torch's own: values, gradients, under vmap."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fedloom.ops.resize import by_products, resized

SIZES = [((5, 7), (11, 20)), ((12, 16), (12, 40)), ((9, 9), (4, 3)), ((1, 1), (6, 5)), ((16,), (45,)), ((30,), (7,))]


@pytest.mark.parametrize(("there", "wanted"), SIZES)
def test_products_equal_torch(there: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    x = torch.randn(2, 3, *there, dtype=torch.float64, requires_grad=True)
    mode = {1: "linear", 2: "bilinear"}[len(there)]
    weight = torch.randn(2, 3, *wanted, dtype=torch.float64)
    ours, theirs = by_products(x, wanted), F.interpolate(x, size=wanted, mode=mode, align_corners=False)
    assert torch.allclose(ours, theirs, atol=1e-12)
    grads = [torch.autograd.grad((y * weight).sum(), x)[0] for y in (ours, theirs)]
    assert torch.allclose(*grads, atol=1e-12)
    assert torch.allclose(torch.vmap(lambda v: by_products(v, wanted))(x[None])[0], theirs, atol=1e-12)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_cuda_in_any_type_and_every_time_the_same(dtype: torch.dtype) -> None:
    x = torch.randn(4, 11, 23, 30, device="cuda", dtype=dtype, requires_grad=True)
    found = []
    for _ in range(2):
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            y = resized(x, (180, 240))
        assert y.dtype == dtype
        found.append(torch.autograd.grad((y.float() ** 2).sum(), x)[0])
    near = F.interpolate(x.float(), size=(180, 240), mode="bilinear", align_corners=False)
    assert torch.allclose(y.float(), near, atol=1e-5 if dtype == torch.float32 else 3e-2)
    assert torch.equal(*found)
