"""Linear layers, cross-entropies and squared lengths of a cohort on CUDA, as torch has them for one client after another."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fedloom import kernels
from tests.engines.test_kernels import DEVICE, compare, cuda, random


@cuda
@pytest.mark.parametrize("shape", [(3, 4, 5), (2, 3, 11, 6, 7), (2, 2, 70, 129), (1, 2, 1, 3), (2, 3, 4200)])
@pytest.mark.parametrize("unused", [-100, 2])
def test_cross_entropies(shape: tuple[int, ...], unused: int) -> None:
    z = (random(*shape) * 30).detach().requires_grad_()
    draw = torch.Generator().manual_seed(1)
    y = torch.randint(0, shape[2], (*shape[:2], *shape[3:]), generator=draw).to(DEVICE)
    y.view(-1)[0] = unused
    expected = F.cross_entropy(z.flatten(0, 1), y.flatten(0, 1), ignore_index=unused, reduction="none").view(y.shape)
    launched = torch.vmap(lambda z, y: kernels.cross_entropies(z, y, unused))(z, y)
    assert "CohortCrossEntropy" in type(launched.grad_fn).__name__
    compare(launched, expected, [z])


@cuda
@pytest.mark.parametrize("shape", [(7, 5), (2, 7, 5)])
@pytest.mark.parametrize("bias", [True, False])
def test_linear(shape: tuple[int, ...], bias: bool) -> None:
    x, w, b = random(3, *shape), random(3, 4, 5), random(3, 4) if bias else None
    inputs = [t for t in (x, w, b) if t is not None]
    found = torch.vmap(lambda *each: kernels.linear(each[0], each[1], each[2] if bias else None))(*inputs)
    assert "CohortLinear" in type(found.grad_fn).__name__
    expected = torch.stack([F.linear(x[i], w[i], None if b is None else b[i]) for i in range(3)])
    (gradient,) = torch.autograd.grad(found.sum(), [w], retain_graph=True)
    compare(found, expected, inputs)
    assert gradient.is_contiguous(), "optimisers read it beside the weights"


@cuda
def test_linear_on_rows_that_all_clients_share() -> None:
    x, w, b = random(7, 5), random(3, 4, 5), random(3, 4)
    found = torch.vmap(kernels.linear, in_dims=(None, 0, 0))(x, w, b)
    assert "CohortLinear" in type(found.grad_fn).__name__
    compare(found, torch.stack([F.linear(x, w[i], b[i]) for i in range(3)]), [x, w, b])


@cuda
def test_a_layer_behind_may_work_in_place() -> None:
    x, w, z = random(3, 2, 7, 5), random(3, 4, 5), random(3, 4, 5)
    y = torch.zeros(3, 4, dtype=torch.long, device=DEVICE)
    compare(torch.vmap(lambda x, w: kernels.linear(x, w, None).relu_())(x, w), (x @ w.mT[:, None]).relu(), [x, w])
    found = torch.vmap(lambda z, y: kernels.cross_entropies(z, y).mul_(2))(z, y)
    compare(found, 2 * F.cross_entropy(z.flatten(0, 1), y.flatten(), reduction="none").view(3, 4), [z])


@cuda
@pytest.mark.parametrize("shape", [(3, 4, 5), (2, 7), (3, 2, 3, 4)])
def test_squared_length(shape: tuple[int, ...]) -> None:
    x = random(*shape)
    compare(torch.vmap(kernels.squared_length)(x), (x**2).flatten(1).sum(1), [x])
