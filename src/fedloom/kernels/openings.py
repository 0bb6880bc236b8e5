"""Triton kernel for the first layers of a network: a convolution of short patches, ReLU and pooling, without a gradient.

With ``k = (c, r, s)`` over channels and places of a filter, of windows w of two columns that do not overlap,

    y_w = relu(max_{p in w} sum_k w[o, k] x[k at p] + b[o])

Patches are read where they are multiplied: neither they nor the map in front of the ReLU is ever in memory. Products are TF32's, as
convolutions in torch's default precision are, or those of the inputs' 16 bits. Imported on machines with CUDA only.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,type-arg,import-untyped,import-not-found"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fedloom.kernels.geometry import Geometry
from fedloom.kernels.norms import either, rectified
from fedloom.kernels.patches import patched

DEEP = 16
"""Rows of a patch that are multiplied at a time: the fewest of a product in Triton, and on an H200 as fast as 32."""
TILE = 2048
"""Channels times windows of a program; measured on an H200, as fast as half or twice as many."""


@triton.jit
def _open(
    x, w, bias, y, batch, by_w, by_b,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, R: tl.constexpr,
    S: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, DH: tl.constexpr,
    DW: tl.constexpr, N: tl.constexpr, HIGH: tl.constexpr, BIAS: tl.constexpr, SIX: tl.constexpr, LAST: tl.constexpr,
    BO: tl.constexpr, BK: tl.constexpr, BQ: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = OH // HIGH
    COLUMNS: tl.constexpr = OW // 2
    AREA: tl.constexpr = ROWS * COLUMNS
    K: tl.constexpr = C * R * S
    picture = tl.program_id(0).to(tl.int64)
    client = picture // batch
    o = tl.arange(0, BO)
    p = tl.program_id(1) * (2 * BQ) + tl.arange(0, 2 * BQ)  # places of windows, row by row: two for each
    x += picture * (C * H * W)
    best = tl.zeros((BO, BQ), tl.float32)
    for high in tl.static_range(HIGH):
        top = ((p // (2 * COLUMNS)) * HIGH + high) * SH - PH
        left = (p % (2 * COLUMNS)) * SW - PW
        total = tl.zeros((BO, 2 * BQ), tl.float32)
        for first in tl.static_range(0, K, BK):
            k = first + tl.arange(0, BK)
            here = (p < 2 * AREA)[None, :]
            patch = patched(x, top * W + left, top, left, k, here, C, H, W, R, S, PH, PW, DH, DW)
            own = (o < N)[:, None] & (k < K)[None, :]
            filters = tl.load(w + client * by_w + (o * K)[:, None] + k[None, :], mask=own, other=0.0)
            total = tl.dot(filters, patch, total, input_precision="tf32")
        here, right = tl.split(tl.reshape(total, (BO, BQ, 2)))
        here = tl.where((right > here) | (right != right), right, here)
        if high > 0:
            here = tl.where((here > best) | (here != here), here, best)
        best = here
    if BIAS:
        best += tl.load(bias + client * by_b + o, mask=o < N, other=0.0).to(tl.float32)[:, None]
    q = tl.program_id(1) * BQ + tl.arange(0, BQ)
    if LAST:
        where = q[None, :] * N + o[:, None]
    else:
        where = q[None, :] + o[:, None] * AREA
    here = (o < N)[:, None] & (q < AREA)[None, :]
    tl.store(y + picture * (N * AREA) + where, rectified(best, SIX).to(y.dtype.element_ty), mask=here)


def opened(x: Tensor, w: Tensor, bias: Tensor | None, shape: Geometry, high: int, *, six: bool, last: bool) -> Tensor:
    """What a convolution, ReLU (of at most 6) and pooling over windows of ``high`` x 2 return.

    Args:
        x: (clients, batch, channels, height, width), without gaps.
        w: (clients, outputs, channels, kernel height, kernel width), each client's without gaps; of shared ones the stride is 0.
        bias: (clients, outputs), likewise, or None.
        shape: of the convolution.
        high: height of the windows.
        six: whether the activation ends at 6.
        last: whether channels lie last in what is returned.
    """
    clients, batch = x.shape[:2]
    outputs, rows, columns = w.shape[1], shape.out[0] // high, shape.out[1] // 2
    size = (rows, columns, outputs) if last else (outputs, rows, columns)
    y = x.new_empty(clients, batch, *size)
    tall = max(16, triton.next_power_of_2(outputs))
    across = max(16, min(TILE // tall, triton.next_power_of_2(rows * columns)))
    _open[(clients * batch, triton.cdiv(rows * columns, across))](
        x, w, either(bias, x), y, batch, w.stride(0), 0 if bias is None else bias.stride(0), **shape.sizes, N=outputs,
        HIGH=high, BIAS=bias is not None, SIX=six, LAST=last, BO=tall, BK=DEEP, BQ=across, num_warps=2,
    )  # fmt: skip
    return y.permute(0, 1, 4, 2, 3) if last else y
