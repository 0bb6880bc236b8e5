"""Cross-entropy of a cohort's rows or pixels.

    -log p_y = log sum exp z - z_y      its gradient: p_c - [c = y]

The forward kernel reads the logits once; the backward kernel reads them once and writes the gradient.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedloom import ops
from fedloom.gpu.cohort import apply_to_cohort, is_cohort
from fedloom.gpu.tap_summary import block_sizes
from fedloom.tasks.batch import Batch


def cross_entropies(logits: Tensor, y: Tensor, ignore_index: int = -100) -> Tensor | None:
    """Return ``-log p_y`` per row or position. Plain form: :func:`fedloom.ops.losses.cross_entropies`.

    Args:
        logits: (rows, classes, positions...).
        y: labels, (rows, positions...).
        ignore_index: label whose loss is 0.
    """
    if not logits.numel() or y.shape != (*logits.shape[:1], *logits.shape[2:]) or not is_cohort(logits, y):
        return None
    losses: Tensor = apply_to_cohort(_CohortCrossEntropy, logits, y, ignore_index)
    return losses


def mean_cross_entropy(output: Tensor, batch: Batch) -> Tensor | None:
    """Return the mean over the real rows. Plain form: :func:`fedloom.tasks.builtin.mean_cross_entropy`."""
    return batch.mean(ops.cross_entropies(output, batch.y)) if is_cohort(output) else None


class _CohortCrossEntropy(torch.autograd.Function):
    """z: (clients, rows, classes, positions...); y: (clients, rows, positions...)."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, y: Tensor, ignore_index: int) -> Tensor:
        flat, labels = z.contiguous().view(z.shape[0] * z.shape[1], z.shape[2], -1), y.contiguous()
        rows, classes, positions = flat.shape
        double = z.dtype == torch.float64
        loss = torch.empty(y.shape, dtype=torch.float64 if double else torch.float32, device=z.device)
        log_sum = torch.empty_like(loss)
        block_classes, block_positions = block_sizes(classes, positions)
        dtype, lowest = (tl.float64, -1e308) if double else (tl.float32, -3e38)
        _forward_kernel[(rows, triton.cdiv(positions, block_positions))](
            flat, labels, loss, log_sum, classes, positions, ignore_index,
            DTYPE=dtype, LOWEST=lowest, BC=block_classes, BP=block_positions,
        )  # fmt: skip
        ctx.save_for_backward(flat, labels, log_sum)
        ctx.size, ctx.ignore_index = z.shape, ignore_index
        return loss.to(z.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        flat, labels, log_sum = ctx.saved_tensors
        rows, classes, positions = flat.shape
        dz, dy = torch.empty_like(flat), dy.to(log_sum.dtype).contiguous()
        block_classes, block_positions = block_sizes(classes, positions)
        dtype = tl.float64 if flat.dtype == torch.float64 else tl.float32
        _backward_kernel[(rows, triton.cdiv(positions, block_positions))](
            flat, labels, log_sum, dy, dz, classes, positions, ctx.ignore_index,
            DTYPE=dtype, BC=block_classes, BP=block_positions,
        )  # fmt: skip
        return dz.view(ctx.size), None, None


@triton.jit
def _forward_kernel(
    z,
    y,
    loss,
    log_sum,
    classes,
    positions,
    ignore_index,
    DTYPE: tl.constexpr,
    LOWEST: tl.constexpr,
    BC: tl.constexpr,
    BP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    position = tl.program_id(1) * BP + tl.arange(0, BP)
    valid_position = position < positions
    label = tl.load(y + row * positions + position, mask=valid_position, other=0)
    maximum = tl.full((BP,), LOWEST, DTYPE)
    total = tl.zeros((BP,), DTYPE)
    label_logit = tl.zeros((BP,), DTYPE)
    for start in range(0, classes, BC):
        c = start + tl.arange(0, BC)
        valid = (c < classes)[:, None] & valid_position[None, :]
        logits = tl.load(z + (row * classes + c[:, None]) * positions + position[None, :], mask=valid, other=LOWEST).to(
            DTYPE
        )
        new_maximum = tl.maximum(maximum, tl.max(logits, 0))
        total = total * tl.exp(maximum - new_maximum) + tl.sum(
            tl.where(valid, tl.exp(logits - new_maximum[None, :]), 0.0), 0
        )
        label_logit += tl.sum(tl.where(valid & (c[:, None] == label[None, :]), logits, 0.0), 0)
        maximum = new_maximum
    log_sum_value = maximum + tl.log(tl.where(valid_position, total, 1.0))
    tl.store(
        loss + row * positions + position,
        tl.where(label == ignore_index, 0.0, log_sum_value - label_logit),
        mask=valid_position,
    )
    tl.store(log_sum + row * positions + position, log_sum_value, mask=valid_position)


@triton.jit
def _backward_kernel(
    z, y, log_sum, dy, dz, classes, positions, ignore_index, DTYPE: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    position = tl.program_id(1) * BP + tl.arange(0, BP)
    valid_position = position < positions
    label = tl.load(y + row * positions + position, mask=valid_position, other=0)
    log_sum_value = tl.load(log_sum + row * positions + position, mask=valid_position, other=0.0)
    grad = tl.where(
        label == ignore_index, 0.0, tl.load(dy + row * positions + position, mask=valid_position, other=0.0)
    )
    for start in range(0, classes, BC):
        c = start + tl.arange(0, BC)
        valid = (c < classes)[:, None] & valid_position[None, :]
        index = (row * classes + c[:, None]) * positions + position[None, :]
        p = tl.exp(tl.load(z + index, mask=valid, other=0.0).to(DTYPE) - log_sum_value[None, :])
        tl.store(dz + index, grad[None, :] * (p - tl.where(c[:, None] == label[None, :], 1.0, 0.0)), mask=valid)
