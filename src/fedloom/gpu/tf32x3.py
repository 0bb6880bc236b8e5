"""Products of float32 on tensor cores: three products of TF32 that together keep float32's precision.

With ``a = A + a'`` and ``b = B + b'``, the nearest TF32 and the rest, ``ab = AB + Ab' + a'B`` up to ``a'b'``, some 2^-22 of it. Sums are
float32. Factors may have any strides; factors that are contiguous along the summed axis are read fastest.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedloom.gpu.cohort import is_available, tensor_or

MIN_DEPTH, MIN_PRODUCTS = 64, 1 << 21
"""Fewest summands, and fewest multiplications of a cohort, for which three products of TF32 were faster on an H200."""
FEW_ROWS, MANY_COLUMNS = 48, 1 << 13
"""With fewer rows per client they are faster only if the cohort has fewer columns than this."""
MIN_GRADIENT_PRODUCTS = 1 << 26
"""Fewest multiplications for the gradient of weights, whose factors are not contiguous along the summed axis."""
MAX_ROWS = 1 << 22
"""CUDA's grid has room for the programs of fewer rows than this."""
BLOCK_DEPTH = 32
"""Summands of a step."""
MIN_PROGRAMS = 264
"""The kernel splits sums if there are fewer programs: two per multiprocessor of an H200."""


def matmul_transposed(
    a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor, *, accumulate: bool = False
) -> Tensor | None:
    """Compute ``a b^T + bias`` per client. Plain form: :func:`fedloom.ops.products.matmul_transposed`."""
    if not is_supported(a, b, out):
        return None
    return multiply(a, b, None if bias is None else bias.contiguous(), out, accumulate=accumulate)


def transpose_weight(d: Tensor, weight: Tensor) -> Tensor | None:
    """Copy the transposed weight if that makes ``d weight`` faster. Plain form: :func:`fedloom.ops.products.transpose_weight`."""
    return weight.mT.contiguous() if is_supported(d, weight.mT) else None


def weight_gradient(d: Tensor, x: Tensor) -> Tensor | None:
    """Compute ``d^T x`` per client. Plain form: :func:`fedloom.ops.products.weight_gradient`."""
    out = d.new_empty(len(d), d.shape[2], x.shape[2])
    return matmul_transposed(d.mT, x.mT, None, out) if out.numel() * d.shape[1] >= MIN_GRADIENT_PRODUCTS else None


def is_supported(a: Tensor, b: Tensor, *others: Tensor) -> bool:
    """Return whether ``a b^T`` is faster this way and the kernel's 32-bit indices reach each client's values.

    Args:
        a: (clients, rows, depth).
        b: (clients, columns, depth).
        others: other tensors of the kernel.
    """
    last = max([sum((n - 1) * s for n, s in zip(t.shape[1:], t.stride()[1:], strict=True)) for t in (a, b, *others)])
    return last < 1 << 31 and is_faster(a, a.shape[0], a.shape[1], b.shape[1])


def is_faster(x: Tensor, clients: int, rows: int, columns: int) -> bool:
    """Return whether products over the last axis of a float32 tensor are faster as three of TF32.

    They are not if torch may use TF32 itself, and not possible before compute capability 8.
    """
    tf32_allowed = torch.backends.cuda.matmul.allow_tf32
    if x.dtype != torch.float32 or tf32_allowed or not is_available(x) or not _has_tf32(x.device):
        return False
    depth = x.shape[-1]
    few = rows < FEW_ROWS and clients * columns >= MANY_COLUMNS
    return depth >= MIN_DEPTH and clients * rows * columns * depth >= MIN_PRODUCTS and rows < MAX_ROWS and not few


@cache
def _has_tf32(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] >= 8


@cache
def _is_hopper(device: torch.device) -> bool:
    """Return whether tensor cores read from shared memory, so that 4 warps have registers for a tile of 128 rows."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def multiply(a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor, *, accumulate: bool = False) -> Tensor:
    """Compute ``a b^T + bias`` per client, or add ``a b^T`` to ``out``.

    Args:
        a: (clients, rows, depth).
        b: (clients, columns, depth).
        bias: (clients, columns), contiguous, or None.
        out: (clients, rows, columns), with contiguous rows; overwritten and returned.
        accumulate: whether to add to ``out``.
    """
    (clients, rows, depth), columns = a.shape, b.shape[1]
    block_rows = 64 if rows <= 64 else 128
    tiles = triton.cdiv(rows, block_rows), triton.cdiv(columns, 64)
    blocks = triton.cdiv(depth, BLOCK_DEPTH)
    split = 1 if accumulate else max(1, min(MIN_PROGRAMS // (tiles[0] * tiles[1] * clients), blocks // 4))
    steps = triton.cdiv(blocks, split)
    partial = out if split == 1 else out.new_empty(clients * split, rows, columns)
    _kernel[(tiles[1], tiles[0], clients * split)](
        a, b, tensor_or(bias, a), partial, rows, columns, depth, steps, *a.stride(), *b.stride(), *partial.stride()[:2],
        BIAS=bias is not None, ACCUMULATE=accumulate, SPLIT=split, EVEN=depth % (BLOCK_DEPTH * split) == 0,
        BM=block_rows, BN=64, BK=BLOCK_DEPTH, num_warps=4 if block_rows == 64 or _is_hopper(a.device) else 8,
        num_stages=4 if block_rows == 64 else 3,
    )  # fmt: skip
    return out if split == 1 else torch.sum(partial.unflatten(0, (clients, split)), 1, out=out)


@triton.jit
def _kernel(
    a, b, bias, y, rows, columns, depth, steps, a_stride, a_row_stride, a_depth_stride, b_stride, b_column_stride, b_depth_stride, y_stride, y_row_stride,
    BIAS: tl.constexpr, ACCUMULATE: tl.constexpr, SPLIT: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    client, part = (tl.program_id(2) // SPLIT).to(tl.int64), tl.program_id(2) % SPLIT
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    a += client * a_stride
    b += client * b_stride
    total = tl.zeros((BM, BN), tl.float32)
    for step in range(part * steps, (part + 1) * steps):
        k = step * BK + tl.arange(0, BK)
        valid_a, valid_b = (m < rows)[:, None], (n < columns)[None, :]
        if not EVEN:
            valid_a, valid_b = valid_a & (k < depth)[None, :], valid_b & (k < depth)[:, None]
        left = tl.load(a + (m[:, None] * a_row_stride + k[None, :] * a_depth_stride), mask=valid_a, other=0.0)
        right = tl.load(b + (n[None, :] * b_column_stride + k[:, None] * b_depth_stride), mask=valid_b, other=0.0)
        total = tl.dot(left, right, total, input_precision="tf32x3")
    if BIAS:
        bias_value = tl.load(bias + client * columns + n, mask=n < columns, other=0.0)
        total += tl.where(part == 0, bias_value, 0.0)[None, :]
    y += tl.program_id(2).to(tl.int64) * y_stride + (m[:, None] * y_row_stride + n[None, :])
    valid = (m < rows)[:, None] & (n < columns)[None, :]
    if ACCUMULATE:
        total += tl.load(y, mask=valid, other=0.0)
    tl.store(y, total, mask=valid)
