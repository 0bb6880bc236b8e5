"""Torch's fused optimisers against the plain step."""

from __future__ import annotations

import pytest
import torch

from fedloom.gpu import optimizers
from fedloom.spec.optimizer import optimizer_step
from tests.core.test_optim import CASES


@pytest.mark.parametrize("case", [c for c in CASES if "clipped" not in c])
def test_fused_step_equals_the_plain_step(case: str) -> None:
    """With transposed gradients, as ``vmap`` returns those of linear layers; rate and step count are tensors."""
    optimizer, draw = CASES[case][0], torch.Generator().manual_seed(0)
    plain = [torch.randn(4, 3, 5, generator=draw), torch.randn(4, 3, generator=draw)]
    fused = [p.clone() for p in plain]
    states = [optimizer.init(plain), optimizer.init(fused)]
    states[1].step = torch.zeros((), dtype=torch.float64)
    for _ in range(20):
        grads = [torch.randn(4, 5, 3, generator=draw).transpose(1, 2), torch.randn(4, 3, generator=draw)]
        optimizer_step(optimizer, plain, grads, states[0], optimizer.lr)
        states[1].step = states[1].step + 1
        optimizers.fused_step(optimizer, fused, grads, states[1], torch.tensor(optimizer.lr, dtype=torch.float64))
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(plain, fused, strict=True))
