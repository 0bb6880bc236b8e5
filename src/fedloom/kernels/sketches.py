"""Triton kernel for projections of long vectors: every coordinate is added to one of a few sums, with a sign.

    y[i, b] = sum_{j: h(j) = b} s(j) (x[i, j] + c[j])

in float64, of coordinates j that lie sum by sum: each sum is made in one place and in a fixed order, where adding coordinate by
coordinate would have them wait for each other. Imported on machines with CUDA only.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,type-arg,import-untyped,import-not-found"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedloom.kernels.norms import either

MOST = 16
"""Clients that a program serves."""
PIECE = 64
"""Coordinates that it reads at a time; measured on an H200, 128 and 256 are as fast."""


@triton.jit
def _sketch(
    x, base, order, sign, starts, y, clients, numbers, width,
    BASE: tl.constexpr, BC: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    i = tl.program_id(1) * BC + tl.arange(0, BC)
    known = i < clients
    total = tl.zeros((BC,), tl.float64)
    first = tl.load(starts + b)
    last = tl.load(starts + b + 1)
    for at in range(first, last, BJ):
        j = at + tl.arange(0, BJ)
        here = j < last
        where = tl.load(order + j, mask=here, other=0)
        signed = tl.load(sign + j, mask=here, other=0).to(tl.float64)
        own = known[:, None] & here[None, :]
        value = tl.load(x + (i[:, None].to(tl.int64) * numbers + where[None, :]), mask=own, other=0.0)
        if BASE:
            value += tl.load(base + where, mask=here, other=0.0)[None, :]
        total += tl.sum(value.to(tl.float64) * signed[None, :], 1)
    tl.store(y + i.to(tl.int64) * width + b, total, mask=known)


def projected(x: Tensor, base: Tensor | None, order: Tensor, sign: Tensor, starts: Tensor) -> Tensor:
    """Clients x sums.

    Args:
        x: clients x numbers, without gaps.
        base: numbers that are added to every client's, or None.
        order: coordinates, sum by sum.
        sign: theirs, in that order.
        starts: where the coordinates of each sum begin in it, and where the last ones end.
    """
    (clients, numbers), width = x.shape, len(starts) - 1
    y = torch.empty(clients, width, dtype=torch.float64, device=x.device)
    tall = min(MOST, triton.next_power_of_2(clients))
    _sketch[(width, triton.cdiv(clients, tall))](
        x, either(base, x), order, sign, starts, y, clients, numbers, width, BASE=base is not None, BC=tall, BJ=PIECE, num_warps=2,
    )  # fmt: skip
    return y
