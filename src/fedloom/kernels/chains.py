"""Triton kernels for [batch normalisation,] ReLU [and pooling over windows that do not overlap] in one go.

With ``v = z weight + bias`` as in :mod:`fedloom.kernels.norms` (or ``v = x``) and windows of pixels ``w``,

    y_w = relu(max_{p in w} v_p)      dv_p = dy_w [p = argmax, the first one] [v_p > 0]

so that neither ``v`` nor ``relu(v)`` is ever in memory. The place of a window's maximum is kept in a byte, 255 where ReLU lets no
gradient through, and ``x`` at that place: sums over windows then need a quarter of ``x`` for windows of 2x2, and the gradient
of ReLU and pooling alone does not need ``x`` at all. Tiles are planes by pixels: what belongs to a channel is read once per row of
a tile. Imported on machines with CUDA only.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,type-arg,import-untyped,import-not-found"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedloom.kernels.norms import normal, shut, wide

TILE = 1024
"""Pixels that a program takes, or half as many windows."""


@triton.jit
def _larger(
    raw, best, winner, spot, middle, factor, gain, shift,
    PLACE: tl.constexpr, NORM: tl.constexpr, AFFINE: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """The best of a window so far after one more place of it: the first of equal ones, NaN above all."""
    if NORM:
        value = normal(raw, middle, factor, gain, shift, AFFINE, SUM)
    else:
        value = raw.to(SUM)
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
def _forward(
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
    out = tl.where(best <= 0.0, 0.0, best)
    if SIX:
        out = tl.where(best >= 6.0, 6.0, out)
    first = client * planes * (OH * OW)
    y += first
    where = (plane * (OH * OW))[:, None] + q[None, :]
    tl.store(y + where, out.to(y.dtype.element_ty), mask=here)
    if KEEP:
        place += first
        tl.store(place + where, tl.where(shut(best, SIX), 255, spot).to(tl.uint8), mask=here)
        if NORM:
            kept += first
            tl.store(kept + where, winner, mask=here)


@triton.jit
def _backward(
    x, dy, place, dx, mask, mean, scale, weight, bias, sums, count, batch, channels,
    H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
    POOL: tl.constexpr, AFFINE: tl.constexpr, MASKED: tl.constexpr, SIX: tl.constexpr, SUM: tl.constexpr,
    BP: tl.constexpr, BQ: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(2).to(tl.int64)
    planes = batch * channels
    plane = tl.program_id(0) * BP + tl.arange(0, BP)
    q = tl.program_id(1) * BQ + tl.arange(0, BQ)
    row = plane < planes
    here = row[:, None] & (q < H * W)[None, :]
    first = client * planes * (H * W)
    x += first
    dx += first
    where = (plane * (H * W))[:, None] + q[None, :]
    raw = tl.load(x + where, mask=here, other=0.0)
    channel = client * channels + plane % channels
    middle = tl.load(mean + channel, mask=row, other=0.0)[:, None]
    factor = tl.load(scale + channel, mask=row, other=0.0)[:, None]
    plain = tl.load(sums + channel * 2, mask=row, other=0.0)[:, None]
    along = tl.load(sums + channel * 2 + 1, mask=row, other=0.0)[:, None]
    gain = factor
    shift = middle
    ahead = factor
    if AFFINE:
        gain = tl.load(weight + channel, mask=row, other=0.0).to(SUM)[:, None]
        shift = tl.load(bias + channel, mask=row, other=0.0).to(SUM)[:, None]
        ahead = factor * gain
    if POOL:
        h, w = q // W, q % W
        i, j = h // R, w // S
        inside = here & ((i < OH) & (j < OW))[None, :]
        place += client * planes * (OH * OW)
        dy += client * planes * (OH * OW)
        window = (plane * (OH * OW))[:, None] + (i * OW + j)[None, :]
        chosen = tl.load(place + window, mask=inside, other=255)
        arrived = tl.load(dy + window, mask=inside, other=0.0).to(SUM)
        arrived = tl.where(chosen == ((h % R) * S + w % S)[None, :], arrived, 0.0)
    else:
        dy += first
        arrived = tl.load(dy + where, mask=here, other=0.0).to(SUM)
        arrived = tl.where(shut(normal(raw, middle, factor, gain, shift, AFFINE, SUM), SIX), 0.0, arrived)
    share = 1.0 / tl.load(count + client)
    if MASKED:
        share = share * tl.load(mask + client * batch + plane // channels, mask=row, other=0.0).to(SUM)[:, None]
    z = (raw.to(SUM) - middle) * factor
    made = ahead * (arrived - share * (plain + z * along))
    tl.store(dx + where, made.to(dx.dtype.element_ty), mask=here)


def _tile(planes: int, pixels: int, size: int) -> tuple[int, int, tuple[int, int]]:
    """Planes and pixels of a tile, powers of two, and how many tiles there are each way."""
    wide = min(triton.next_power_of_2(pixels), size)
    high = min(triton.next_power_of_2(planes), size // wide)
    return high, wide, (triton.cdiv(planes, high), triton.cdiv(pixels, wide))


def forward(
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
    high, wide_, grid = _tile(planes, rows * columns, TILE if window == (1, 1) else TILE // 2)
    _forward[(*grid, clients)](
        x, y, _or(place, x), _or(kept, x), _or(mean, x), _or(scale, x), _or(weight, x), _or(bias, x), planes, channels,
        H=height, W=width, OH=rows, OW=columns, R=window[0], S=window[1], NORM=norm is not None,
        AFFINE=weight is not None, SIX=six, KEEP=keep, SUM=wide(x)[1], BP=high, BQ=wide_, num_warps=4,
    )  # fmt: skip
    return y, place, kept


def backward(
    x: Tensor,
    dy: Tensor,
    place: Tensor | None,
    mask: Tensor | None,
    norm: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    sums: Tensor,
    count: Tensor,
    window: tuple[int, int],
    *,
    six: bool,
) -> Tensor:
    """The gradient of ``x``: that of a normalisation whose own gradient arrives at the places only, or through ReLU."""
    clients, batch, channels, height, width = x.shape
    mean, scale, weight, bias = norm
    dx = torch.empty_like(x)
    high, wide_, grid = _tile(batch * channels, height * width, TILE)
    _backward[(*grid, clients)](
        x, dy, _or(place, x), dx, _or(mask, x), mean, scale, _or(weight, x), _or(bias, x), sums, count, batch, channels,
        H=height, W=width, OH=dy.shape[3], OW=dy.shape[4], R=window[0], S=window[1], POOL=place is not None,
        AFFINE=weight is not None, MASKED=mask is not None, SIX=six, SUM=wide(x)[1], BP=high, BQ=wide_, num_warps=4,
    )  # fmt: skip
    return dx


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """A tensor, or in the place of one that the kernel does not touch, any other."""
    return other if tensor is None else tensor
