"""Triton kernel for sums over clients: ``y = sum_k w_k x_k``, added up in the order of the clients.

Each number is read once and its sum is in a register meanwhile. Imported on machines with CUDA only.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,type-arg,import-untyped,import-not-found"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fedloom.kernels.norms import wide

BLOCK = 1024


@triton.jit
def _add(x, w, y, clients, numbers, SUM: tl.constexpr, BQ: tl.constexpr):
    q = tl.program_id(0).to(tl.int64) * BQ + tl.arange(0, BQ)
    here = q < numbers
    total = tl.load(x + q, mask=here, other=0.0).to(SUM) * tl.load(w).to(SUM)
    for k in range(1, clients):
        x += numbers
        total += tl.load(x + q, mask=here, other=0.0).to(SUM) * tl.load(w + k).to(SUM)
    tl.store(y + q, total.to(y.dtype.element_ty), mask=here)


def added(x: Tensor, w: Tensor) -> Tensor:
    """The weighted sum of (clients, ...), without gaps, over the clients."""
    y = x.new_empty(x.shape[1:])
    _add[(triton.cdiv(y.numel(), BLOCK),)](x, w, y, len(x), y.numel(), SUM=wide(x)[1], BQ=BLOCK, num_warps=4)
    return y
