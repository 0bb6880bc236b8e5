"""The cross-entropy of a cohort's rows or pixels, on CUDA under ``vmap``: two kernels instead of a score."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.kernels.cohort import _Lifted, serves

UNUSED = -100
"""Torch's label of rows that do not count."""


def cross_entropies(logits: Tensor, y: Tensor, ignore_index: int = UNUSED) -> Tensor:
    """``-log p_y`` of each row or pixel, p the softmax over axis 1; 0 where the label is ``ignore_index``."""
    if not logits.numel() or y.shape != (*logits.shape[:1], *logits.shape[2:]) or not serves(logits, y):
        return F.cross_entropy(logits, y, ignore_index=ignore_index, reduction="none")
    value: Tensor = _Lifted.apply(_CohortCrossEntropy, logits, y, ignore_index)  # type: ignore[no-untyped-call]
    return value


class _CohortCrossEntropy(torch.autograd.Function):
    """z: (clients, rows, classes, positions...); y: (clients, rows, positions...)."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, y: Tensor, ignore_index: int) -> Tensor:
        from fedloom.kernels import likelihoods

        flat = z.contiguous().view(z.shape[0] * z.shape[1], z.shape[2], -1)
        labels = y.contiguous()
        value, log_sum = likelihoods.negative(flat, labels, ignore_index)
        ctx.save_for_backward(flat, labels, log_sum)
        ctx.size, ctx.ignore_index = z.shape, ignore_index
        return value.to(z.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        from fedloom.kernels import likelihoods

        flat, labels, log_sum = ctx.saved_tensors
        slope = dy.to(log_sum.dtype).contiguous()
        return likelihoods.negative_back(flat, labels, log_sum, slope, ctx.ignore_index).view(ctx.size), None, None
