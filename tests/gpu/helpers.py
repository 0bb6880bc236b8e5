"""What tests of kernels share: the device, the condition, random tensors, comparison of values and gradients.

Without a GPU, ``TRITON_INTERPRET=1`` and an installed triton run the tests on a CPU (``scripts/test_kernels``).
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from fedloom.engines.choose_device import choose_device
from fedloom.ops import dispatch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
kernels = pytest.mark.skipif(
    not find_spec("triton") or (DEVICE == "cpu" and not dispatch.INTERPRETED),
    reason="needs triton and a CUDA device, or TRITON_INTERPRET=1",
)
choose_device(DEVICE, "fp32")  # registers the kernels
TF32 = 4e-3
"""Relative error of products of numbers with a mantissa of 10 bits."""


def random(*shape: int) -> Tensor:
    """Return a float64 leaf of random numbers."""
    draw = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=draw, dtype=torch.float64).to(DEVICE).requires_grad_()


def compare(ours: Tensor, theirs: Tensor, inputs: list[Tensor], scale: float = 1e-11) -> None:
    """Compare two outputs and their gradients with respect to the inputs."""
    assert torch.allclose(ours, theirs, atol=scale, rtol=scale)
    weight = torch.randn(theirs.shape, dtype=theirs.dtype, device=theirs.device)
    found, expected = (torch.autograd.grad((y * weight).sum(), inputs) for y in (ours, theirs))
    for a, b in zip(found, expected, strict=True):
        assert torch.allclose(a, b, atol=scale * 100, rtol=scale * 100)


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return random numbers of a dtype."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))).to(DEVICE, dtype)


def coarse(*shape: int) -> Tensor:
    """Return multiples of 1/4: sums of their products are exact, so that maxima do not depend on the order."""
    return (4 * numbers(*shape)).round() / 4


def count_calls(monkeypatch: pytest.MonkeyPatch, function: type[torch.autograd.Function]) -> list[int]:
    """Return a list that gets one entry per call of an autograd function."""
    calls: list[int] = []
    apply: Callable[..., object] = function.apply

    def counted(*args: object) -> object:
        calls.append(1)
        return apply(*args)

    monkeypatch.setattr(function, "apply", counted)
    return calls
