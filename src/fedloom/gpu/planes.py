"""Triton kernels for depthwise convolutions of a cohort: every plane of a picture has a filter of its own.

    y[b, c, i, j] = bias[c] + sum_{r, s} w[c, r, s] x[b, c, i stride + r dilation - padding, j stride + s dilation - padding]

Planes stay where they are, client by client; a grouped convolution would have them side by side, and turned back. Sums over a batch are
made in pieces that are joined in a fixed order. Imported on machines with CUDA only.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,type-arg,import-untyped,import-not-found"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fedloom.gpu.geometry import Geometry
from fedloom.gpu.norms import either, tile, wide

PIXELS = 1024
"""Pixels of a program."""
PROGRAMS = 4096
"""Programs that the gradient of filters is made of at most, unless there are more channels than that: enough to fill a large device."""


@triton.jit
def _product(
    source, w, plane, cell, place, row, inside, C: tl.constexpr, AREA: tl.constexpr, PLACES: tl.constexpr, SUM: tl.constexpr
):  # fmt: skip
    """Cells of planes of that area, each times one place of the plane's filter."""
    value = tl.load(source + (plane * AREA)[:, None] + cell[None, :], mask=inside, other=0.0)
    weight = tl.load(w + (plane % C) * PLACES + place, mask=row, other=0.0)
    return value.to(SUM) * weight.to(SUM)[:, None]


@triton.jit
def _filtered(
    x, w, bias, y, by_w, by_b, planes,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, R: tl.constexpr,
    S: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, DH: tl.constexpr,
    DW: tl.constexpr, BIAS: tl.constexpr, SUM: tl.constexpr, BP: tl.constexpr, BQ: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(2).to(tl.int64)
    plane = tl.program_id(0) * BP + tl.arange(0, BP)
    q = tl.program_id(1) * BQ + tl.arange(0, BQ)
    row = plane < planes
    here = row[:, None] & (q < OH * OW)[None, :]
    x += client * planes * (H * W)
    w += client * by_w
    total = tl.zeros((BP, BQ), SUM)
    if BIAS:
        total += tl.load(bias + client * by_b + plane % C, mask=row, other=0.0).to(SUM)[:, None]
    for r in tl.static_range(R):
        for s in tl.static_range(S):
            i = (q // OW) * SH + (r * DH - PH)
            j = (q % OW) * SW + (s * DW - PW)
            inside = here & ((i >= 0) & (i < H) & (j >= 0) & (j < W))[None, :]
            total += _product(x, w, plane, i * W + j, r * S + s, row, inside, C, H * W, R * S, SUM)
    y += client * planes * (OH * OW)
    tl.store(y + (plane * (OH * OW))[:, None] + q[None, :], total.to(y.dtype.element_ty), mask=here)


@triton.jit
def _filtered_back(
    dy, w, dx, by_w, planes,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, R: tl.constexpr,
    S: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, DH: tl.constexpr,
    DW: tl.constexpr, SUM: tl.constexpr, BP: tl.constexpr, BQ: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(2).to(tl.int64)
    plane = tl.program_id(0) * BP + tl.arange(0, BP)
    q = tl.program_id(1) * BQ + tl.arange(0, BQ)
    row = plane < planes
    here = row[:, None] & (q < H * W)[None, :]
    dy += client * planes * (OH * OW)
    w += client * by_w
    total = tl.zeros((BP, BQ), SUM)
    for r in tl.static_range(R):
        for s in tl.static_range(S):
            i = q // W + (PH - r * DH)
            j = q % W + (PW - s * DW)
            inside = (i >= 0) & (j >= 0) & (i % SH == 0) & (j % SW == 0)
            i, j = i // SH, j // SW
            inside = here & (inside & (i < OH) & (j < OW))[None, :]
            total += _product(dy, w, plane, i * OW + j, r * S + s, row, inside, C, OH * OW, R * S, SUM)
    dx += client * planes * (H * W)
    tl.store(dx + (plane * (H * W))[:, None] + q[None, :], total.to(dx.dtype.element_ty), mask=here)


@triton.jit
def _filter_slopes(
    x, dy, parts, batch, piece,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, R: tl.constexpr,
    S: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, DH: tl.constexpr,
    DW: tl.constexpr, BIAS: tl.constexpr, SUM: tl.constexpr, BP: tl.constexpr, BQ: tl.constexpr,
):  # fmt: skip
    channel, part, client = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    x += client * batch * (C * H * W)
    dy += client * batch * (C * OH * OW)
    parts += ((client * C + channel) * tl.num_programs(1) + part) * (R * S + 1)
    first = part * piece
    last = tl.minimum(first + piece, batch)
    # Place by place, each of which reads all planes: what belongs to a pixel is then found once for many pictures.
    for place in tl.static_range(R * S + BIAS):
        total = tl.zeros((BP, BQ), SUM)
        for start in range(0, OH * OW, BQ):
            q = start + tl.arange(0, BQ)
            i = (q // OW) * SH + ((place // S) * DH - PH)
            j = (q % OW) * SW + ((place % S) * DW - PW)
            inside = q < OH * OW
            if place < R * S:
                inside = inside & (i >= 0) & (i < H) & (j >= 0) & (j < W)
            for begin in range(first, last, BP):
                picture = begin + tl.arange(0, BP)
                plane = picture * C + channel
                here = (picture < last)[:, None] & inside[None, :]
                slope = tl.load(dy + (plane * (OH * OW))[:, None] + q[None, :], mask=here, other=0.0).to(SUM)
                if place < R * S:
                    value = tl.load(x + (plane * (H * W))[:, None] + (i * W + j)[None, :], mask=here, other=0.0)
                    total += value.to(SUM) * slope
                else:
                    total += slope
        tl.store(parts + place, tl.sum(tl.sum(total, 1), 0))


def filtered(x: Tensor, w: Tensor, bias: Tensor | None, shape: Geometry) -> Tensor:
    """The depthwise convolution of (clients, batch, channels, height, width), without gaps.

    Args:
        x: the pictures.
        w: (clients, channels, 1, kernel height, kernel width), each client's without gaps; of shared ones the stride is 0.
        bias: (clients, channels), likewise, or None.
        shape: of the convolution.
    """
    clients, batch, channels = x.shape[:3]
    y = x.new_empty(clients, batch, channels, *shape.out)
    planes = batch * channels
    high, across, grid = tile(planes, shape.out[0] * shape.out[1], PIXELS)
    _filtered[(*grid, clients)](
        x, w, either(bias, x), y, w.stride(0), 0 if bias is None else bias.stride(0), planes, **shape.sizes,
        BIAS=bias is not None, SUM=wide(x)[1], BP=high, BQ=across, num_warps=4,
    )  # fmt: skip
    return y


def filtered_back(dy: Tensor, w: Tensor, shape: Geometry) -> Tensor:
    """The gradient with respect to the pictures."""
    clients, batch, channels = dy.shape[:3]
    dx = dy.new_empty(clients, batch, channels, shape.height, shape.width)
    planes = batch * channels
    high, across, grid = tile(planes, shape.height * shape.width, PIXELS)
    _filtered_back[(*grid, clients)](
        dy, w, dx, w.stride(0), planes, **shape.sizes, SUM=wide(dy)[1], BP=high, BQ=across, num_warps=4
    )
    return dx


def filter_slopes(x: Tensor, dy: Tensor, shape: Geometry, *, biased: bool) -> tuple[Tensor, Tensor | None]:
    """The gradients with respect to each client's filters (clients, channels, 1, kernel height, kernel width) and biases (clients, channels)."""
    clients, batch, channels = x.shape[:3]
    places = shape.kernel[0] * shape.kernel[1]
    high, across, (pictures, _) = tile(batch, shape.out[0] * shape.out[1], PIXELS)
    count = max(1, min(PROGRAMS // (clients * channels), pictures))
    each = triton.cdiv(triton.cdiv(batch, count), high) * high
    count = triton.cdiv(batch, each)
    kind, in_triton = wide(x)
    parts = x.new_empty(clients, channels, count, places + 1, dtype=kind)
    _filter_slopes[(channels, count, clients)](
        x, dy, parts, batch, each, **shape.sizes, BIAS=int(biased), SUM=in_triton, BP=high, BQ=across, num_warps=4
    )
    whole = (parts[:, :, 0] if count == 1 else parts.sum(2)).to(x.dtype)
    slopes = whole[..., :places].reshape(clients, channels, 1, *shape.kernel)
    return slopes, whole[..., places] if biased else None
