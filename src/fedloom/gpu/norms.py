"""Triton kernels for the batch normalisation of a cohort: statistics of the real rows of every client and channel.

With weight ``m_b`` (1 for a real row, 0 for padding) and ``n = sum m_b pixels``:

    mean = sum m x / n      var = sum m (x - mean)^2 / n      z = (x - mean) / sqrt(var + eps)      y = z weight + bias
    dx = weight / sqrt(var + eps) (dy - m/n (sum dy + z sum dy z))      dweight = sum dy z      dbias = sum dy

In a chain with ReLU and pooling (:func:`fedloom.gpu.patches.chained`) ``dy`` is zero but at the places of the maxima that ReLU lets
through; there, tiles are planes by pixels: what belongs to a channel is read once per row of a tile.

Sums are made in pieces that are joined in a fixed order (Chan's formula for the variance). Imported on machines with CUDA only.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,type-arg,import-untyped,import-not-found"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
TILE = 1024
"""Pixels of a chain of layers that a program takes, or half as many windows."""


@triton.jit
def _moments(
    x, mask, parts, batch, channels, piece, HW: tl.constexpr, MASKED: tl.constexpr, SUM: tl.constexpr, BQ: tl.constexpr
):
    channel, part, client = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    x += client * batch * channels * HW
    cells = batch * HW
    first = part * piece
    last = tl.minimum(first + piece, cells)
    count = tl.zeros((), SUM)
    mean = tl.zeros((), SUM)
    square = tl.zeros((), SUM)
    for start in range(first, last, BQ):
        q = start + tl.arange(0, BQ)
        here = q < last
        b = q // HW
        value = tl.load(x + (b * channels + channel) * HW + q % HW, mask=here, other=0.0).to(SUM)
        if MASKED:
            weight = tl.load(mask + client * batch + b, mask=here, other=0.0).to(SUM)
        else:
            weight = here.to(SUM)
        n = tl.sum(weight, 0)
        middle = tl.sum(value * weight, 0) / tl.maximum(n, 1)
        away = (value - middle) * weight
        spread = tl.sum(away * away, 0)
        total = tl.maximum(count + n, 1)
        gap = middle - mean
        square += spread + gap * gap * (count * n / total)
        mean += gap * (n / total)
        count += n
    where = parts + ((client * channels + channel) * tl.num_programs(1) + part) * 3
    tl.store(where, count)
    tl.store(where + 1, mean)
    tl.store(where + 2, square)


@triton.jit
def _joined(parts, mean, var, count, channels, PIECES: tl.constexpr, SUM: tl.constexpr, BC: tl.constexpr):
    client = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    here = c < channels
    channel = client * channels + c
    total = tl.zeros((BC,), SUM)
    middle = tl.zeros((BC,), SUM)
    square = tl.zeros((BC,), SUM)
    for part in range(PIECES):
        where = parts + (channel * PIECES + part) * 3
        n = tl.load(where, mask=here, other=0.0)
        gap = tl.load(where + 1, mask=here, other=0.0) - middle
        both = tl.maximum(total + n, 1)
        square += tl.load(where + 2, mask=here, other=0.0) + gap * gap * (total * n / both)
        middle += gap * (n / both)
        total += n
    tl.store(mean + channel, middle, mask=here)
    tl.store(var + channel, square / tl.maximum(total, 1), mask=here)
    tl.store(count + client + c, total, mask=c == 0)  # every channel has as many values


@triton.jit
def _apply(
    x,
    y,
    mean,
    scale,
    weight,
    bias,
    batch,
    channels,
    cells,
    HW: tl.constexpr,
    AFFINE: tl.constexpr,
    SUM: tl.constexpr,
    BQ: tl.constexpr,
):
    client = tl.program_id(1).to(tl.int64)
    q = tl.program_id(0) * BQ + tl.arange(0, BQ)
    here = q < cells
    channel = client * channels + (q // HW) % channels
    value = tl.load(x + client * cells + q, mask=here, other=0.0).to(SUM)
    value = (value - tl.load(mean + channel, mask=here, other=0.0)) * tl.load(scale + channel, mask=here, other=0.0)
    if AFFINE:
        value = value * tl.load(weight + channel, mask=here, other=0.0).to(SUM) + tl.load(
            bias + channel, mask=here, other=0.0
        ).to(SUM)
    tl.store(y + client * cells + q, value.to(y.dtype.element_ty), mask=here)


@triton.jit
def normal(raw, middle, factor, gain, shift, AFFINE: tl.constexpr, SUM: tl.constexpr):
    """A value as the layer returns it: rounded to its own type, in which activation and pooling compare."""
    value = (raw.to(SUM) - middle) * factor
    if AFFINE:
        value = value * gain + shift
    return value.to(raw.dtype).to(SUM)


@triton.jit
def rectified(value, SIX: tl.constexpr):
    """A ReLU (of at most 6), NaN for NaN."""
    value = tl.where(value <= 0.0, 0.0, value)
    if SIX:
        value = tl.where(value >= 6.0, 6.0, value)
    return value


@triton.jit
def shut(value, SIX: tl.constexpr):
    """Where a ReLU (of at most 6) lets no gradient through; it lets that of NaN through."""
    flat = value <= 0.0
    if SIX:
        flat = flat | (value >= 6.0)
    return flat


@triton.jit
def _sums(
    x, dy, mean, scale, weight, bias, parts, batch, channels, piece,
    HW: tl.constexpr, GATED: tl.constexpr, AFFINE: tl.constexpr, SIX: tl.constexpr, SUM: tl.constexpr, BQ: tl.constexpr,
):  # fmt: skip
    channel, part, client = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    x += client * batch * channels * HW
    dy += client * batch * channels * HW
    first = part * piece
    last = tl.minimum(first + piece, batch * HW)
    middle = tl.load(mean + client * channels + channel)
    factor = tl.load(scale + client * channels + channel)
    gain = factor
    shift = middle
    if AFFINE:
        gain = tl.load(weight + client * channels + channel).to(SUM)
        shift = tl.load(bias + client * channels + channel).to(SUM)
    plain = tl.zeros((BQ,), SUM)
    along = tl.zeros((BQ,), SUM)
    for start in range(first, last, BQ):
        q = start + tl.arange(0, BQ)
        here = q < last
        where = ((q // HW) * channels + channel) * HW + q % HW
        arrived = tl.load(dy + where, mask=here, other=0.0).to(SUM)
        raw = tl.load(x + where, mask=here, other=0.0)
        if GATED:
            arrived = tl.where(shut(normal(raw, middle, factor, gain, shift, AFFINE, SUM), SIX), 0.0, arrived)
        plain += arrived
        along += arrived * ((raw.to(SUM) - middle) * factor)
    where = parts + ((client * channels + channel) * tl.num_programs(1) + part) * 2
    tl.store(where, tl.sum(plain, 0))
    tl.store(where + 1, tl.sum(along, 0))


@triton.jit
def _back(
    x, dy, dx, mask, mean, scale, weight, sums, count, batch, channels, cells,
    HW: tl.constexpr, AFFINE: tl.constexpr, MASKED: tl.constexpr, SUM: tl.constexpr, BQ: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(1).to(tl.int64)
    q = tl.program_id(0) * BQ + tl.arange(0, BQ)
    here = q < cells
    channel = client * channels + (q // HW) % channels
    arrived = tl.load(dy + client * cells + q, mask=here, other=0.0).to(SUM)
    value = tl.load(x + client * cells + q, mask=here, other=0.0).to(SUM)
    factor = tl.load(scale + channel, mask=here, other=0.0)
    z = (value - tl.load(mean + channel, mask=here, other=0.0)) * factor
    share = 1.0 / tl.load(count + client)
    if MASKED:
        share = share * tl.load(mask + client * batch + q // (HW * channels), mask=here, other=0.0).to(SUM)
    plain = tl.load(sums + channel * 2, mask=here, other=0.0)
    along = tl.load(sums + channel * 2 + 1, mask=here, other=0.0)
    if AFFINE:
        factor = factor * tl.load(weight + channel, mask=here, other=0.0).to(SUM)
    tl.store(
        dx + client * cells + q, (factor * (arrived - share * (plain + z * along))).to(dx.dtype.element_ty), mask=here
    )


@triton.jit
def _chain_back(
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


def wide(x: Tensor) -> tuple[torch.dtype, tl.dtype]:
    """The type in which sums are made, in torch and in Triton."""
    return (torch.float64, tl.float64) if x.dtype == torch.float64 else (torch.float32, tl.float32)


def _pieces(clients: int, channels: int, cells: int) -> tuple[int, int]:
    """Into how many pieces sums are cut, and their length: enough programs to fill a large device."""
    count = max(1, min(2048 // (clients * channels), cells // (4 * BLOCK)))
    length = triton.cdiv(triton.cdiv(cells, count), BLOCK) * BLOCK
    return triton.cdiv(cells, length), length


def moments(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and variance of (clients, batch, channels, pixels) per client and channel, and the number of values."""
    clients, batch, channels, pixels = x.shape
    kind, accumulator = wide(x)
    count, length = _pieces(clients, channels, batch * pixels)
    parts = torch.empty((clients, channels, count, 3), dtype=kind, device=x.device)
    _moments[(channels, count, clients)](
        x, x if mask is None else mask, parts, batch, channels, length,
        HW=pixels, MASKED=mask is not None, SUM=accumulator, BQ=BLOCK, num_warps=4,
    )  # fmt: skip
    mean, var = (torch.empty((clients, channels), dtype=kind, device=x.device) for _ in range(2))
    total = torch.empty(clients, dtype=kind, device=x.device)
    _joined[(triton.cdiv(channels, 128), clients)](
        parts, mean, var, total, channels, PIECES=count, SUM=accumulator, BC=128, num_warps=4
    )
    return mean, var, total


def apply(x: Tensor, y: Tensor, mean: Tensor, scale: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
    """Writes ``(x - mean) scale weight + bias`` to ``y``."""
    clients, batch, channels, pixels = x.shape
    cells = x[0].numel()
    _apply[(triton.cdiv(cells, BLOCK), clients)](
        x, y, mean, scale, x if weight is None else weight, x if bias is None else bias, batch, channels, cells,
        HW=pixels, AFFINE=weight is not None, SUM=wide(x)[1], BQ=BLOCK, num_warps=4,
    )  # fmt: skip


def sums(
    x: Tensor,
    dy: Tensor,
    mean: Tensor,
    scale: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    gated: bool = False,
    six: bool = False,
) -> Tensor:
    """Per client and channel the pair (dbias, dweight); ``gated``: ``dy`` is that of a ReLU (of at most 6) behind the norm."""
    clients, batch, channels, pixels = x.shape
    kind, accumulator = wide(x)
    pieces, length = _pieces(clients, channels, batch * pixels)
    parts = torch.empty((clients, channels, pieces, 2), dtype=kind, device=x.device)
    _sums[(channels, pieces, clients)](
        x, dy, mean, scale, x if weight is None else weight, x if bias is None else bias, parts, batch, channels, length,
        HW=pixels, GATED=gated, AFFINE=weight is not None, SIX=six, SUM=accumulator, BQ=BLOCK, num_warps=4,
    )  # fmt: skip
    return parts.sum(2)


def back(
    x: Tensor, dy: Tensor, mask: Tensor | None, mean: Tensor, scale: Tensor, weight: Tensor | None, count: Tensor
) -> tuple[Tensor, Tensor]:
    """``dx``, and per client and channel the pair (dbias, dweight)."""
    clients, batch, channels, pixels = x.shape
    both = sums(x, dy, mean, scale)
    dx = torch.empty_like(x)
    cells = x[0].numel()
    _back[(triton.cdiv(cells, BLOCK), clients)](
        x, dy, dx, x if mask is None else mask, mean, scale, x if weight is None else weight, both, count, batch,
        channels, cells, HW=pixels, AFFINE=weight is not None, MASKED=mask is not None, SUM=wide(x)[1], BQ=BLOCK,
        num_warps=4,
    )  # fmt: skip
    return dx, both


def chain_back(
    x: Tensor,
    dy: Tensor,
    place: Tensor | None,
    mask: Tensor | None,
    norm: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    both: Tensor,
    count: Tensor,
    window: tuple[int, int],
    *,
    six: bool,
) -> Tensor:
    """The gradient of ``x``: that of a normalisation whose own gradient arrives at the places only, or through ReLU."""
    clients, batch, channels, height, width = x.shape
    mean, scale, weight, bias = norm
    dx = torch.empty_like(x)
    high, across, grid = tile(batch * channels, height * width, TILE)
    _chain_back[(*grid, clients)](
        x, dy, either(place, x), dx, either(mask, x), mean, scale, either(weight, x), either(bias, x), both, count, batch, channels,
        H=height, W=width, OH=dy.shape[3], OW=dy.shape[4], R=window[0], S=window[1], POOL=place is not None,
        AFFINE=weight is not None, MASKED=mask is not None, SIX=six, SUM=wide(x)[1], BP=high, BQ=across, num_warps=4,
    )  # fmt: skip
    return dx


def tile(planes: int, pixels: int, size: int) -> tuple[int, int, tuple[int, int]]:
    """Planes and pixels of a tile, powers of two, and how many tiles there are each way."""
    across = min(triton.next_power_of_2(pixels), size)
    high = min(triton.next_power_of_2(planes), size // across)
    return high, across, (triton.cdiv(planes, high), triton.cdiv(pixels, across))


def either(tensor: Tensor | None, other: Tensor) -> Tensor:
    """A tensor, or in the place of one that the kernel does not touch, any other."""
    return other if tensor is None else tensor
