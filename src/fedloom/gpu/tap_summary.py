"""Mean and negative entropy of a cohort's features (rows, channels, positions), for information-theoretic terms of taps.

With m the largest channel of a position, ``s = sum exp(z - m)`` and ``t = sum (z - m) exp(z - m)``, of n positions

    u = sum_n z / n      v = sum p log p = t / s - log s      e = sum_n v / n      dz = (p (log p - v) de + du) / n

The forward kernel reads z once; the backward kernel reads it once and writes the gradient.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedloom.gpu.cohort import apply_to_cohort, is_cohort

MANY_ROWS = 256
"""From this number of rows on, a program takes more positions of one row: the rows alone fill a device."""


def channel_summary(z: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the means over positions of ``z`` and of ``sum_c p_c log p_c``, p the softmax over channels.

    Plain form: :func:`fedloom.ops.features.channel_summary`.

    Args:
        z: (rows, channels, positions...).

    Returns:
        (rows, channels) and (rows,). Both share one backward kernel.
    """
    z = z[:, :, None] if z.dim() == 2 else z  # a feature without positions has one
    if not z.numel() or not z.is_floating_point() or not is_cohort(z):
        return None
    mean, entropy = apply_to_cohort(_CohortSummary, z)
    return mean, entropy


class _CohortSummary(torch.autograd.Function):
    """z: (clients, rows, channels, positions...)."""

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> tuple[Tensor, Tensor]:
        flat = z.contiguous().flatten(0, 1).flatten(2)
        rows, channels, positions = flat.shape
        double = z.dtype == torch.float64
        block_channels, block_positions = block_sizes(channels, positions, rows)
        blocks = triton.cdiv(positions, block_positions)
        shapes = (rows, positions), (rows, positions), (rows, blocks, channels), (rows, blocks)
        entropies, log_sums, means, mean_entropies = (
            torch.empty(shape, dtype=torch.float64 if double else torch.float32, device=z.device) for shape in shapes
        )
        dtype, lowest = (tl.float64, -1e308) if double else (tl.float32, -3e38)
        _forward_kernel[(rows, blocks)](
            flat, entropies, log_sums, means, mean_entropies, channels, positions,
            DTYPE=dtype, LOWEST=lowest, BC=block_channels, BP=block_positions,
            num_warps=8 if block_positions >= 1024 else 4,
        )  # fmt: skip
        mean, entropy = (t[:, 0] if blocks == 1 else t.sum(1) for t in (means, mean_entropies))
        ctx.save_for_backward(flat, entropies, log_sums)
        ctx.size = z.shape
        return mean.view(z.shape[:3]).to(z.dtype), entropy.view(z.shape[:2]).to(z.dtype)

    @staticmethod
    def backward(ctx: Any, d_mean: Tensor, d_entropy: Tensor) -> Tensor:
        flat, entropies, log_sums = ctx.saved_tensors
        rows, channels, positions = flat.shape
        dz = torch.empty_like(flat)
        dtype = tl.float64 if flat.dtype == torch.float64 else tl.float32
        block_channels, block_positions = block_sizes(channels, positions, rows)
        _backward_kernel[(rows, triton.cdiv(positions, block_positions))](
            flat, entropies, log_sums, d_mean.contiguous(), d_entropy.contiguous(), dz, channels, positions,
            DTYPE=dtype, BC=block_channels, BP=block_positions,
        )  # fmt: skip
        return dz.view(ctx.size)


def block_sizes(channels: int, positions: int, rows: int = 0) -> tuple[int, int]:
    """Return the numbers of channels and positions of a block, powers of two."""
    block_positions = min(1024 if rows >= MANY_ROWS else 128, triton.next_power_of_2(positions))
    return min(triton.next_power_of_2(channels), max(1, 4096 // block_positions)), block_positions


@triton.jit
def _forward_kernel(
    z, entropies, log_sums, means, mean_entropies, channels, positions,
    DTYPE: tl.constexpr, LOWEST: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    block = row * tl.num_programs(1) + tl.program_id(1)
    position = tl.program_id(1) * BP + tl.arange(0, BP)
    valid_position = position < positions
    maximum = tl.full((BP,), LOWEST, DTYPE)
    total = tl.zeros((BP,), DTYPE)
    moment = tl.zeros((BP,), DTYPE)
    for start in range(0, channels, BC):
        channel = start + tl.arange(0, BC)
        valid = (channel < channels)[:, None] & valid_position[None, :]
        features = tl.load(
            z + (row * channels + channel[:, None]) * positions + position[None, :], mask=valid, other=LOWEST
        ).to(DTYPE)
        mean = tl.sum(tl.where(valid, features, 0.0), 1) / positions
        tl.store(means + block * channels + channel, mean, mask=channel < channels)
        new_maximum = tl.maximum(maximum, tl.max(features, 0))
        rescale = tl.exp(maximum - new_maximum)
        difference = features - new_maximum[None, :]
        weight = tl.where(valid, tl.exp(difference), 0.0)
        moment = rescale * (moment + (maximum - new_maximum) * total) + tl.sum(
            tl.where(valid, difference * weight, 0.0), 0
        )
        total = rescale * total + tl.sum(weight, 0)
        maximum = new_maximum
    total = tl.where(valid_position, total, 1.0)
    entropy = moment / total - tl.log(total)
    tl.store(entropies + row * positions + position, entropy, mask=valid_position)
    tl.store(log_sums + row * positions + position, maximum + tl.log(total), mask=valid_position)
    tl.store(mean_entropies + block, tl.sum(tl.where(valid_position, entropy, 0.0), 0) / positions)


@triton.jit
def summary_gradient(z, log_sum, entropy, d_entropy, d_mean):
    """Dz of a block of channels and positions: ``p (log p - v) de + du``, shares of both given."""
    log = z - log_sum
    return d_entropy * tl.exp(log) * (log - entropy) + d_mean


@triton.jit
def _backward_kernel(
    z, entropies, log_sums, d_mean, d_entropy, dz, channels, positions, DTYPE: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    position = tl.program_id(1) * BP + tl.arange(0, BP)
    valid_position = position < positions
    entropy = tl.load(entropies + row * positions + position, mask=valid_position, other=0.0)
    log_sum = tl.load(log_sums + row * positions + position, mask=valid_position, other=0.0)
    grad_entropy = tl.load(d_entropy + row).to(DTYPE) / positions
    for start in range(0, channels, BC):
        channel = start + tl.arange(0, BC)
        valid = (channel < channels)[:, None] & valid_position[None, :]
        index = (row * channels + channel[:, None]) * positions + position[None, :]
        features = tl.load(z + index, mask=valid, other=0.0).to(DTYPE)
        grad_mean = tl.load(d_mean + row * channels + channel, mask=channel < channels, other=0.0).to(DTYPE) / positions
        grad = summary_gradient(features, log_sum[None, :], entropy[None, :], grad_entropy, grad_mean[:, None])
        tl.store(dz + index, grad.to(dz.dtype.element_ty), mask=valid)
