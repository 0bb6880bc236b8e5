"""What is asked of a cohort's features, on CUDA under ``vmap``: their mean over positions and their negative entropy over channels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedloom.gpu.cohort import _Lifted, serves


def channel_summary(z: Tensor) -> tuple[Tensor, Tensor] | None:
    """Means over positions of ``z`` and of ``sum_c p_c log p_c``, p the softmax over axis 1, of one client inside ``vmap``.

    Args:
        z: (rows, channels, positions...).

    Returns:
        (rows, channels) and (rows,), of which the backward pass is one; None where no kernel serves.
    """
    z = z[:, :, None] if z.dim() == 2 else z  # a feature without positions has one
    if not z.numel() or not z.is_floating_point() or not serves(z):
        return None
    mean, entropy = _Lifted.apply(_CohortSummary, z)  # type: ignore[no-untyped-call]
    return mean, entropy


class _CohortSummary(torch.autograd.Function):
    """z: (clients, rows, channels, positions...)."""

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> tuple[Tensor, Tensor]:
        from fedloom.gpu import softmaxes

        flat = z.contiguous().flatten(0, 1).flatten(2)
        mean, entropy, value, log_sum = softmaxes.summed_up(flat)
        ctx.save_for_backward(flat, value, log_sum)
        ctx.size = z.shape
        return mean.view(z.shape[:3]).to(z.dtype), entropy.view(z.shape[:2]).to(z.dtype)

    @staticmethod
    def backward(ctx: Any, d_mean: Tensor, d_entropy: Tensor) -> Tensor:
        from fedloom.gpu import softmaxes

        flat, value, log_sum = ctx.saved_tensors
        slopes = d_mean.contiguous(), d_entropy.contiguous()
        return softmaxes.summed_up_back(flat, value, log_sum, *slopes).view(ctx.size)
