"""Batch normalisation of a cohort against torch's, client by client, in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.network import layers
from fedloom.ops import forward_context
from tests.gpu.helpers import DEVICE, compare, kernels, random

pytest.importorskip("triton")
from fedloom.gpu import batch_norm, cohort


@kernels
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", [(3, 6, 5, 4, 3), (2, 70, 3, 33, 40)], ids=["one sum", "partial sums"])
def test_values_and_gradients(masked: bool, affine: bool, shape: tuple[int, ...]) -> None:
    clients, batch, channels = shape[:3]
    x = random(*shape)
    weight, bias = (random(clients, channels), random(clients, channels)) if affine else (None, None)
    mask = (torch.arange(batch) < batch - 2).double().expand(clients, batch).contiguous().to(DEVICE) if masked else None
    inputs = [t for t in (x, weight, bias) if t is not None]
    real = batch - 2 if masked else batch

    def ours(packed: dict[str, Tensor]) -> tuple[Tensor, ...]:
        return batch_norm.normalise(packed["x"], packed.get("mask"), packed.get("w"), packed.get("b"), 1e-5)

    packed = {k: v for k, v in {"x": x, "mask": mask, "w": weight, "b": bias}.items() if v is not None}
    y, mean, var, count = torch.vmap(ours)(packed)
    theirs = torch.stack(
        [
            F.batch_norm(x[i, :real], None, None, *((None, None) if weight is None else (weight[i], bias[i])), True)
            for i in range(clients)
        ]
    )
    # The outputs of padding rows are cut off, so their gradient is zero.
    compare(y[:, :real], theirs, inputs, 1e-9)
    flat = x[:, :real].transpose(1, 2).flatten(2)
    assert torch.allclose(mean, flat.mean(-1))
    assert torch.allclose(var, flat.var(-1, correction=0))
    assert torch.equal(count, torch.full_like(count, real * shape[3] * shape[4]))


@kernels
@pytest.mark.parametrize("masked", [True, False])
def test_shared_weight_and_bias(masked: bool) -> None:
    layer = layers.MaskedBatchNorm2d(3, track_running_stats=False).double().to(DEVICE).requires_grad_(False)
    layer.weight.copy_(random(3)), layer.bias.copy_(random(3) + 1)
    x = random(2, 5, 3, 4, 4).detach()
    mask = (torch.arange(5) < 4).double().expand(2, 5).contiguous().to(DEVICE)

    def fn(x: Tensor, mask: Tensor) -> Tensor:
        with forward_context.entered(forward_context.Frame(mask=mask if masked else None)):
            return layer(x)

    assert torch.vmap(lambda x: torch.tensor(cohort.is_cohort(x, shared=[layer.weight])))(x).all()
    ours, theirs = torch.vmap(fn)(x, mask), torch.stack([fn(*each) for each in zip(x, mask, strict=True)])
    real = 4 if masked else 5
    assert torch.allclose(ours[:, :real], theirs[:, :real], atol=1e-12)
