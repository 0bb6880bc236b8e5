"""The negative entropy of a cohort's features over their channels, on CUDA under ``vmap``: two passes instead of two dozen."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedloom.kernels.cohort import _Lifted, serves


def negative_entropy(z: Tensor) -> Tensor | None:
    """``sum_c p_c log p_c`` with p the softmax over axis 1, of one client inside ``vmap``; None where no kernel serves."""
    if z.dim() < 3 or not z.numel() or not z.is_floating_point() or not serves(z):
        return None
    value: Tensor = _Lifted.apply(_CohortEntropy, z)  # type: ignore[no-untyped-call]
    return value


class _CohortEntropy(torch.autograd.Function):
    """z: (clients, rows, channels, positions...)."""

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        from fedloom.kernels import softmaxes

        flat = z.contiguous().flatten(0, 1).flatten(2)
        value, log_sum = softmaxes.negative_entropy(flat)
        ctx.save_for_backward(flat, value, log_sum)
        ctx.size = z.shape
        return value.view(*z.shape[:2], *z.shape[3:]).to(z.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        from fedloom.kernels import softmaxes

        flat, value, log_sum = ctx.saved_tensors
        slope = dy.to(value.dtype).contiguous().view(value.shape)
        return softmaxes.negative_entropy_back(flat, value, log_sum, slope).view(ctx.size)
