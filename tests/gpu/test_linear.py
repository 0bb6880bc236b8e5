"""Linear layers of a cohort against torch's, client by client, in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fedloom import ops
from tests.gpu.helpers import compare, kernels, random


@kernels
@pytest.mark.parametrize("shape", [(7, 5), (2, 7, 5)])
@pytest.mark.parametrize("bias", [True, False])
def test_values_and_gradients(shape: tuple[int, ...], bias: bool) -> None:
    x, w, b = random(3, *shape), random(3, 4, 5), random(3, 4) if bias else None
    inputs = [t for t in (x, w, b) if t is not None]
    ours = torch.vmap(lambda *each: ops.linear(each[0], each[1], each[2] if bias else None))(*inputs)
    assert "CohortLinear" in type(ours.grad_fn).__name__
    expected = torch.stack([F.linear(x[i], w[i], None if b is None else b[i]) for i in range(3)])
    (gradient,) = torch.autograd.grad(ours.sum(), [w], retain_graph=True)
    compare(ours, expected, inputs)
    assert gradient.is_contiguous(), "optimisers read it together with the weights"


@kernels
def test_shared_rows() -> None:
    x, w, b = random(7, 5), random(3, 4, 5), random(3, 4)
    ours = torch.vmap(ops.linear, in_dims=(None, 0, 0))(x, w, b)
    assert "CohortLinear" in type(ours.grad_fn).__name__
    compare(ours, torch.stack([F.linear(x, w[i], b[i]) for i in range(3)]), [x, w, b])


@kernels
def test_the_next_operation_may_work_in_place() -> None:
    x, w = random(3, 2, 7, 5), random(3, 4, 5)
    compare(torch.vmap(lambda x, w: ops.linear(x, w, None).relu_())(x, w), (x @ w.mT[:, None]).relu(), [x, w])
