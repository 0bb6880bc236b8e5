"""Triton kernels: the patches of pictures as a matrix and back, and pooling over windows behind normalisation and ReLU.

With ``k = (c, r, s)`` over channels and places of a filter, and ``p = (i, j)`` over output pixels of picture ``b``,

    patches[k, b, p] = x[b, c, i stride + r dilation - padding, j stride + s dilation - padding]

so that a convolution is ``y[o, b, p] = sum_k w[o, k] patches[k, b, p]``. One more row of ones serves the bias, rows of zeros
fill up to a multiple of eight, which fast matrix products ask for.

Windows do not overlap. In a chain of [batch normalisation,] ReLU and pooling, with ``v`` what is normalised (or ``x``),

    y_w = relu(max_{p in w} v_p)      dv_p = dy_w [p = argmax, the first one] [v_p > 0]

so that neither ``v`` nor ``relu(v)`` is ever in memory. The place of a window's maximum is kept in a byte, 255 where ReLU lets no
gradient through, and ``x`` at that place: sums over windows then need a quarter of ``x`` for windows of 2x2, and the gradient
of ReLU and pooling alone does not need ``x`` at all. Imported on machines with CUDA only.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,type-arg,import-untyped,import-not-found"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedloom.gpu.geometry import Geometry
from fedloom.gpu.norms import TILE, either, normal, rectified, shut, tile, wide


@triton.jit
def patched(
    source, pixel, top, left, k, here,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, R: tl.constexpr, S: tl.constexpr, PH: tl.constexpr,
    PW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr,
):  # fmt: skip
    """Rows k of the patches whose corners are at (top, left), addresses ``source + pixel``; zeros outside of pictures and where not ``here``."""
    c, r, s = k // (R * S), (k % (R * S)) // S, k % S
    inside = here & (k < C * R * S)[:, None]
    if PH > 0:
        i = top[None, :] + (r * DH)[:, None]
        inside = inside & (i >= 0) & (i < H)
    if PW > 0:
        j = left[None, :] + (s * DW)[:, None]
        inside = inside & (j >= 0) & (j < W)
    # A sum of a part for the pixel and a part for the row: one addition per element.
    row = c * (H * W) + (r * DH) * W + s * DW
    return tl.load(source + (pixel[None, :] + row[:, None]), mask=inside, other=0.0)


@triton.jit
def _gather(
    x, out, pixels,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, R: tl.constexpr,
    S: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, DH: tl.constexpr,
    DW: tl.constexpr, K: tl.constexpr, APART: tl.constexpr, ONES: tl.constexpr, BK: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(2).to(tl.int64)
    q = tl.program_id(0) * BP + tl.arange(0, BP)
    k = tl.program_id(1) * BK + tl.arange(0, BK)
    b, p = q // (OH * OW), q % (OH * OW)
    top, left = (p // OW) * SH - PH, (p % OW) * SW - PW
    here = (q < pixels)[None, :] & (k < K)[:, None]
    source = x + client * (pixels // (OH * OW)) * (C * H * W)
    pixel = b * (C * H * W) + top * W + left
    value = patched(source, pixel, top, left, k, here, C, H, W, R, S, PH, PW, DH, DW)
    if ONES:
        value = tl.where((k == C * R * S)[:, None], 1.0, value)
    if APART:
        where = (b * (K * OH * OW) + p)[None, :] + (k * (OH * OW))[:, None]
    else:
        where = q[None, :] + k[:, None] * pixels
    tl.store(out + client * pixels * K + where, value, mask=here)


@triton.jit
def _scatter(
    d, dx, cells, pixels,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, R: tl.constexpr,
    S: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, DH: tl.constexpr,
    DW: tl.constexpr, K: tl.constexpr, APART: tl.constexpr, SUM: tl.constexpr, BQ: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(1).to(tl.int64)
    q = tl.program_id(0) * BQ + tl.arange(0, BQ)
    b, c = q // (C * H * W), (q // (H * W)) % C
    h, w = (q // W) % H + PH, q % W + PW
    d += client * pixels * K
    total = tl.zeros((BQ,), SUM)
    for r in tl.static_range(R):
        for s in tl.static_range(S):
            i, j = h - r * DH, w - s * DW
            inside = (q < cells) & (i >= 0) & (j >= 0) & (i % SH == 0) & (j % SW == 0)
            i, j = i // SH, j // SW
            inside = inside & (i < OH) & (j < OW)
            k = (c * R + r) * S + s
            if APART:
                where = (b * K + k) * (OH * OW) + i * OW + j
            else:
                where = k * pixels + b * (OH * OW) + i * OW + j
            total += tl.load(d + where, mask=inside, other=0.0).to(SUM)
    tl.store(dx + client * cells + q, total.to(dx.dtype.element_ty), mask=q < cells)


@triton.jit
def _unpool(
    dy, place, dx, cells,
    H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
    BQ: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(1).to(tl.int64)
    q = tl.program_id(0) * BQ + tl.arange(0, BQ)
    outputs = (cells // (H * W)) * (OH * OW)
    dy += client * outputs
    place += client * outputs
    dx += client * cells
    plane, h, w = q // (H * W), (q // W) % H, q % W
    i, j = h // R, w // S
    inside = (q < cells) & (i < OH) & (j < OW)
    where = plane * (OH * OW) + i * OW + j
    chosen = tl.load(place + where, mask=inside, other=255)
    value = tl.load(dy + where, mask=inside, other=0.0)
    value = tl.where(chosen == (h % R) * S + w % S, value, 0.0)
    tl.store(dx + q, value, mask=q < cells)


@triton.jit
def _before(raw, middle, factor, gain, shift, NORM: tl.constexpr, AFFINE: tl.constexpr, SUM: tl.constexpr):
    """What a ReLU is given: x, or x normalised."""
    if NORM:
        value = normal(raw, middle, factor, gain, shift, AFFINE, SUM)
    else:
        value = raw.to(SUM)
    return value


@triton.jit
def _larger(
    raw, best, winner, spot, middle, factor, gain, shift,
    PLACE: tl.constexpr, NORM: tl.constexpr, AFFINE: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """The best of a window so far after one more place of it: the first of equal ones, NaN above all."""
    value = _before(raw, middle, factor, gain, shift, NORM, AFFINE, SUM)
    if PLACE == 0:
        best = value
        winner = raw
    else:
        better = (value > best) | (value != value)
        best = tl.where(better, value, best)
        winner = tl.where(better, raw, winner)
        spot = tl.where(better, PLACE, spot).to(tl.uint8)
    return best, winner, spot


@triton.jit
def _chain(
    x, y, place, kept, mean, scale, weight, bias, planes, channels,
    H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
    NORM: tl.constexpr, AFFINE: tl.constexpr, SIX: tl.constexpr, KEEP: tl.constexpr, SUM: tl.constexpr,
    BP: tl.constexpr, BQ: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(2).to(tl.int64)
    plane = tl.program_id(0) * BP + tl.arange(0, BP)
    q = tl.program_id(1) * BQ + tl.arange(0, BQ)
    row = plane < planes
    here = row[:, None] & (q < OH * OW)[None, :]
    x += client * planes * (H * W)
    middle = 0.0
    factor = 1.0
    gain = 1.0
    shift = 0.0
    if NORM:
        channel = client * channels + plane % channels
        middle = tl.load(mean + channel, mask=row, other=0.0)[:, None]
        factor = tl.load(scale + channel, mask=row, other=0.0)[:, None]
        if AFFINE:
            gain = tl.load(weight + channel, mask=row, other=0.0).to(SUM)[:, None]
            shift = tl.load(bias + channel, mask=row, other=0.0).to(SUM)[:, None]
    best = tl.zeros((BP, BQ), SUM)
    winner = tl.zeros((BP, BQ), x.dtype.element_ty)
    spot = tl.zeros((BP, BQ), tl.uint8)
    if S == 2:
        # Both columns of a window come with one load of neighbours, which a thread then takes apart.
        p = tl.program_id(1) * (2 * BQ) + tl.arange(0, 2 * BQ)
        both = row[:, None] & (p < OH * OW * 2)[None, :]
        pixel = (plane * (H * W))[:, None] + ((p // (2 * OW)) * (R * W) + p % (2 * OW))[None, :]
        for r in tl.static_range(R):
            pair = tl.load(x + (pixel + r * W), mask=both, other=0.0)
            left, right = tl.split(tl.reshape(pair, (BP, BQ, 2)))
            best, winner, spot = _larger(
                left, best, winner, spot, middle, factor, gain, shift, r * 2, NORM, AFFINE, SUM
            )
            best, winner, spot = _larger(
                right, best, winner, spot, middle, factor, gain, shift, r * 2 + 1, NORM, AFFINE, SUM
            )
    else:
        corner = (plane * (H * W))[:, None] + ((q // OW) * (R * W) + (q % OW) * S)[None, :]
        for r in tl.static_range(R):
            for s in tl.static_range(S):
                raw = tl.load(x + (corner + (r * W + s)), mask=here, other=0.0)
                best, winner, spot = _larger(
                    raw, best, winner, spot, middle, factor, gain, shift, r * S + s, NORM, AFFINE, SUM
                )
    first = client * planes * (OH * OW)
    y += first
    where = (plane * (OH * OW))[:, None] + q[None, :]
    tl.store(y + where, rectified(best, SIX).to(y.dtype.element_ty), mask=here)
    if KEEP:
        place += first
        tl.store(place + where, tl.where(shut(best, SIX), 255, spot).to(tl.uint8), mask=here)
        if NORM:
            kept += first
            tl.store(kept + where, winner, mask=here)


def gathered(x: Tensor, shape: Geometry) -> Tensor:
    """Patches of (clients, batch, channels, height, width): (clients, rows, pixels), or picture by picture."""
    clients, batch = x.shape[:2]
    area = shape.out[0] * shape.out[1]
    pixels, rows = batch * area, shape.rows
    out = x.new_empty((clients, batch, rows, area) if shape.apart else (clients, rows, pixels))
    grid = (triton.cdiv(pixels, 256), triton.cdiv(rows, 8), clients)
    _gather[grid](x, out, pixels, **shape.sizes, K=rows, APART=shape.apart, ONES=shape.bias, BK=8, BP=256, num_warps=4)
    return out


def scattered(d: Tensor, size: torch.Size, shape: Geometry) -> Tensor:
    """What patches got, added up where they came from."""
    clients, batch = size[:2]
    dx = d.new_empty(size)
    cells = dx[0].numel()
    pixels = batch * shape.out[0] * shape.out[1]
    _scatter[(triton.cdiv(cells, 512), clients)](
        d, dx, cells, pixels, **shape.sizes, K=shape.rows, APART=shape.apart, SUM=wide(d)[1], BQ=512, num_warps=4
    )
    return dx


def returned(dy: Tensor, place: Tensor, size: torch.Size, kernel: tuple[int, int]) -> Tensor:
    """The gradient of the chain's input (clients, planes, height, width), from the places of the maxima."""
    dx = dy.new_empty(size)
    clients, planes, height, width = size
    cells = planes * height * width
    rows, columns = dy.shape[2:]
    _unpool[(triton.cdiv(cells, 1024), clients)](
        dy, place, dx, cells, H=height, W=width, OH=rows, OW=columns, R=kernel[0], S=kernel[1], BQ=1024, num_warps=4
    )  # fmt: skip
    return dx


def chained(
    x: Tensor,
    window: tuple[int, int],
    norm: tuple[Tensor, Tensor, Tensor | None, Tensor | None] | None,
    *,
    six: bool,
    keep: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The chain's output, the place of each window's maximum (255: no gradient) and ``x`` there.

    Args:
        x: (clients, batch, channels, height, width), contiguous.
        window: height and width of the pooling windows; (1, 1) for none.
        norm: mean, scale, weight and bias, each (clients, channels); None for ReLU and pooling alone.
        six: whether the activation ends at 6.
        keep: whether a gradient may be asked for; places and values are None otherwise, or if there are no windows.
    """
    clients, batch, channels, height, width = x.shape
    rows, columns = height // window[0], width // window[1]
    y = x.new_empty(clients, batch, channels, rows, columns)
    keep = keep and window != (1, 1)
    place = torch.empty_like(y, dtype=torch.uint8) if keep else None
    kept = torch.empty_like(y) if keep and norm is not None else None
    mean, scale, weight, bias = (None,) * 4 if norm is None else norm
    planes = batch * channels
    high, across, grid = tile(planes, rows * columns, TILE if window == (1, 1) else TILE // 2)
    _chain[(*grid, clients)](
        x, y, either(place, x), either(kept, x), either(mean, x), either(scale, x), either(weight, x), either(bias, x), planes, channels,
        H=height, W=width, OH=rows, OW=columns, R=window[0], S=window[1], NORM=norm is not None,
        AFFINE=weight is not None, SIX=six, KEEP=keep, SUM=wide(x)[1], BP=high, BQ=across, num_warps=4,
    )  # fmt: skip
    return y, place, kept
