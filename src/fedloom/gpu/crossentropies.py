"""The cross-entropy of a cohort's rows or pixels, on CUDA under ``vmap``: two kernels instead of a score."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedloom import ops
from fedloom.gpu.cohort import _Lifted, serves
from fedloom.types import Batch


def cross_entropies(logits: Tensor, y: Tensor, ignore_index: int = -100) -> Tensor | None:
    """:func:`fedloom.ops.cross_entropies` of one client inside ``vmap``; None where no kernel serves."""
    if not logits.numel() or y.shape != (*logits.shape[:1], *logits.shape[2:]) or not serves(logits, y):
        return None
    value: Tensor = _Lifted.apply(_CohortCrossEntropy, logits, y, ignore_index)  # type: ignore[no-untyped-call]
    return value


def mean_cross_entropy(output: Tensor, batch: Batch) -> Tensor | None:
    """The mean of them."""
    return batch.mean(ops.cross_entropies(output, batch.y)) if serves(output) else None


class _CohortCrossEntropy(torch.autograd.Function):
    """z: (clients, rows, classes, positions...); y: (clients, rows, positions...)."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, y: Tensor, ignore_index: int) -> Tensor:
        from fedloom.gpu import likelihoods

        flat = z.contiguous().view(z.shape[0] * z.shape[1], z.shape[2], -1)
        labels = y.contiguous()
        value, log_sum = likelihoods.negative(flat, labels, ignore_index)
        ctx.save_for_backward(flat, labels, log_sum)
        ctx.size, ctx.ignore_index = z.shape, ignore_index
        return value.to(z.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        from fedloom.gpu import likelihoods

        flat, labels, log_sum = ctx.saved_tensors
        slope = dy.to(log_sum.dtype).contiguous()
        return likelihoods.negative_back(flat, labels, log_sum, slope, ctx.ignore_index).view(ctx.size), None, None
