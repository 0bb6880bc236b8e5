"""Triton kernel for products of float32 on tensor cores: three of TF32 that together keep float32's digits.

With ``a = A + a'`` and ``b = B + b'``, the nearest of TF32 and what they leave, ``ab = AB + Ab' + a'B`` up to ``a'b'``, some 2^-22 of it. Sums are
float32's. Factors may lie any way; along what is summed over, as tensor cores ask of 32 bits, they are read fastest. Imported on machines with CUDA only.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,type-arg,import-untyped,import-not-found"

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedloom.gpu.norms import either

DEEP = 32
"""Summands at a time."""
PROGRAMS = 264
"""Fewest programs: for fewer the sums are split, two for each of an H200's processors."""


@triton.jit
def _threefold(
    a, b, bias, y, rows, columns, depth, steps, by_a, by_m, by_ak, by_b, by_n, by_bk, by_y, by_row,
    BIAS: tl.constexpr, ONTO: tl.constexpr, SPLIT: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    client, part = (tl.program_id(2) // SPLIT).to(tl.int64), tl.program_id(2) % SPLIT
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    a += client * by_a
    b += client * by_b
    total = tl.zeros((BM, BN), tl.float32)
    for step in range(part * steps, (part + 1) * steps):
        k = step * BK + tl.arange(0, BK)
        here, there = (m < rows)[:, None], (n < columns)[None, :]
        if not EVEN:
            here, there = here & (k < depth)[None, :], there & (k < depth)[:, None]
        left = tl.load(a + (m[:, None] * by_m + k[None, :] * by_ak), mask=here, other=0.0)
        right = tl.load(b + (n[None, :] * by_n + k[:, None] * by_bk), mask=there, other=0.0)
        total = tl.dot(left, right, total, input_precision="tf32x3")
    if BIAS:
        shift = tl.load(bias + client * columns + n, mask=n < columns, other=0.0)
        total += tl.where(part == 0, shift, 0.0)[None, :]
    y += tl.program_id(2).to(tl.int64) * by_y + (m[:, None] * by_row + n[None, :])
    inside = (m < rows)[:, None] & (n < columns)[None, :]
    if ONTO:
        total += tl.load(y, mask=inside, other=0.0)
    tl.store(y, total, mask=inside)


@cache
def _hopper(device: torch.device) -> bool:
    """Whether a tile of 128 rows fits into the registers of four warps: there tensor cores read from shared memory."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def product(a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor, *, onto: bool = False) -> Tensor:
    """``a b^T + bias`` of every client, or that added to what is there.

    Args:
        a: (clients, rows, depth).
        b: (clients, columns, depth).
        bias: (clients, columns), without gaps, or None.
        out: (clients, rows, columns), each row without gaps, which is overwritten and returned.
        onto: whether it is added to.
    """
    (clients, rows, depth), columns = a.shape, b.shape[1]
    high = 64 if rows <= 64 else 128
    tiles = triton.cdiv(rows, high), triton.cdiv(columns, 64)
    blocks = triton.cdiv(depth, DEEP)
    split = 1 if onto else max(1, min(PROGRAMS // (tiles[0] * tiles[1] * clients), blocks // 4))
    steps = triton.cdiv(blocks, split)
    parts = out if split == 1 else out.new_empty(clients * split, rows, columns)
    _threefold[(tiles[1], tiles[0], clients * split)](
        a, b, either(bias, a), parts, rows, columns, depth, steps, *a.stride(), *b.stride(), *parts.stride()[:2],
        BIAS=bias is not None, ONTO=onto, SPLIT=split, EVEN=depth % (DEEP * split) == 0, BM=high, BN=64, BK=DEEP,
        num_warps=4 if high == 64 or _hopper(a.device) else 8, num_stages=4 if high == 64 else 3,
    )  # fmt: skip
    return out if split == 1 else torch.sum(parts.unflatten(0, (clients, split)), 1, out=out)
