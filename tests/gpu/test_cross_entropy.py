"""Cross-entropies of a cohort against torch's, in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fedloom import ops
from tests.gpu.helpers import DEVICE, compare, kernels, random


@kernels
@pytest.mark.parametrize("shape", [(3, 4, 5), (2, 3, 11, 6, 7), (2, 2, 70, 129), (1, 2, 1, 3), (2, 3, 4200)])
@pytest.mark.parametrize("unused", [-100, 2])
def test_cross_entropies(shape: tuple[int, ...], unused: int) -> None:
    z = (random(*shape) * 30).detach().requires_grad_()
    draw = torch.Generator().manual_seed(1)
    y = torch.randint(0, shape[2], (*shape[:2], *shape[3:]), generator=draw).to(DEVICE)
    y.view(-1)[0] = unused
    expected = F.cross_entropy(z.flatten(0, 1), y.flatten(0, 1), ignore_index=unused, reduction="none").view(y.shape)
    ours = torch.vmap(lambda z, y: ops.cross_entropies(z, y, unused))(z, y)
    assert "CohortCrossEntropy" in type(ours.grad_fn).__name__
    compare(ours, expected, [z])


@kernels
def test_the_next_operation_may_work_in_place() -> None:
    z, y = random(3, 4, 5), torch.zeros(3, 4, dtype=torch.long, device=DEVICE)
    ours = torch.vmap(lambda z, y: ops.cross_entropies(z, y).mul_(2))(z, y)
    compare(ours, 2 * F.cross_entropy(z.flatten(0, 1), y.flatten(), reduction="none").view(3, 4), [z])
