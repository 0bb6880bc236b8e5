"""Triton kernels for the first layers of a network: a convolution of short patches, ReLU and pooling, and the gradient of its filters.

With ``k = (c, r, s)`` over channels and places of a filter, of windows q of two columns that do not overlap,

    y_q = relu(max_{p in q} z_p)      z_p = sum_k w[k] x[k at p] + b      dw[k] = sum_p dz_p x[k at p]

Patches are read where they are multiplied: neither they nor the map in front of the ReLU is ever in memory. On the way back dz is made
where it is multiplied too, of the gradient of y and the places of the maxima. Where relu(z) is summed up (:mod:`fedloom.gpu.softmaxes`),
as y then can be, all of it is done on the way, and z is kept: the two places of a row of a window side by side. Products are TF32's, as convolutions in torch's default
precision are, or those of the inputs' 16 bits. Imported on machines with CUDA only.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,type-arg,import-untyped,import-not-found"

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedloom.gpu.geometry import Geometry, Pair
from fedloom.gpu.norms import either, rectified, shut
from fedloom.gpu.patches import _larger, patched
from fedloom.gpu.softmaxes import _gradient

DEEP = 16
"""Rows of a patch that are multiplied at a time: the fewest of a product in Triton, and on an H200 as fast as 32."""
WINDOWS = 64
"""Windows of a program, half of them where maps are summed up; measured on an H200 with up to 32 filters, as are those below."""
BACK = 16
"""Windows that are multiplied at a time on the way back: more would not fit into registers."""
PROGRAMS = 4
"""Programs of the way back for each multiprocessor, about, which are all at work at a time: each makes windows of some pictures of a client."""
LOW = tl.constexpr(-1e30)
"""Of rows that are no filter: below all that a ReLU returns, and still finite with the largest of that taken off."""


@triton.jit
def _rounded(x):
    """Float32 to the nearest of TF32, whose products would cut digits off and make everything smaller; other types as they are."""
    if x.dtype == tl.float32:
        bits = (x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
        return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    else:
        return x


@triton.jit
def _round(x, y, size, B: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    tl.store(y + at, _rounded(tl.load(x + at, mask=at < size, other=0.0)), mask=at < size)


@triton.jit
def _summary(act, N: tl.constexpr):
    """Of channels x positions each position's negative entropy and ``log sum_c exp``."""
    if act.shape[0] > N:
        act = tl.where((tl.arange(0, act.shape[0]) < N)[:, None], act, LOW)
    top = tl.max(act, 0)
    apart = act - top[None, :]
    weight = tl.exp2(apart * 1.4426950408889634)
    total = tl.sum(weight, 0)
    log = tl.log(total)
    return tl.sum(apart * weight, 0) / total - log, top + log


@triton.jit
def _open(
    x, w, bias, y, place, made, value, log_sum, mean, entropy, batch, by_w, by_b,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, R: tl.constexpr,
    S: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, DH: tl.constexpr,
    DW: tl.constexpr, N: tl.constexpr, HIGH: tl.constexpr, BIAS: tl.constexpr, SIX: tl.constexpr,
    KEEP: tl.constexpr, TAPS: tl.constexpr, BO: tl.constexpr, BK: tl.constexpr, BQ: tl.constexpr,
):  # fmt: skip
    COLUMNS: tl.constexpr = OW // 2
    AREA: tl.constexpr = (OH // HIGH) * COLUMNS
    K: tl.constexpr = C * R * S
    picture = tl.program_id(0).to(tl.int64)
    client = picture // batch
    o = tl.arange(0, BO)
    p = tl.program_id(1) * (2 * BQ) + tl.arange(0, 2 * BQ)  # places of windows, row by row: two for each
    filled = p < 2 * AREA
    both = (o < N)[:, None] & filled[None, :]
    x += picture * (C * H * W)
    w += client * by_w
    made += picture * (N * HIGH * 2 * AREA)
    value += picture * ((2 * HIGH + TAPS - 1) * AREA)
    log_sum += picture * ((2 * HIGH + TAPS - 1) * AREA)
    shift = 0.0
    if BIAS:
        shift = tl.load(bias + client * by_b + o, mask=o < N, other=0.0).to(tl.float32)[:, None]
    best = tl.zeros((BO, BQ), tl.float32)
    winner = tl.zeros((BO, BQ), tl.float32)
    spot = tl.zeros((BO, BQ), tl.uint8)
    acts = tl.zeros((BO, 2 * BQ), tl.float32)
    entropies = tl.zeros((2 * BQ,), tl.float32)
    for high in tl.static_range(HIGH):
        top = ((p // (2 * COLUMNS)) * HIGH + high) * SH - PH
        along = (p % (2 * COLUMNS)) * SW - PW
        total = tl.zeros((BO, 2 * BQ), tl.float32)
        for first in tl.static_range(0, K, BK):
            k = first + tl.arange(0, BK)
            patch = patched(x, top * W + along, top, along, k, filled[None, :], C, H, W, R, S, PH, PW, DH, DW)
            own = (o < N)[:, None] & (k < K)[None, :]
            filters = tl.load(w + ((o * K)[:, None] + k[None, :]), mask=own, other=0.0)
            total = tl.dot(_rounded(filters), patch, total, input_precision="tf32")
        total += shift
        if TAPS > 0:
            given = total.to(made.dtype.element_ty)
            tl.store(made + ((o * (HIGH * 2 * AREA))[:, None] + (high * (2 * AREA) + p)[None, :]), given, mask=both)
            act = rectified(given.to(tl.float32), SIX)
            found, lse = _summary(act, N)
            tl.store(value + (high * (2 * AREA) + p), found, mask=filled)
            tl.store(log_sum + (high * (2 * AREA) + p), lse, mask=filled)
            acts += act
            entropies += tl.where(filled, found, 0.0)
        left, right = tl.split(tl.reshape(total, (BO, BQ, 2)))
        best, winner, spot = _larger(left, best, winner, spot, 0.0, 1.0, 1.0, 0.0, high * 2, False, False, tl.float32)
        best, winner, spot = _larger(
            right, best, winner, spot, 0.0, 1.0, 1.0, 0.0, high * 2 + 1, False, False, tl.float32
        )
    q = tl.program_id(1) * BQ + tl.arange(0, BQ)
    inside = q < AREA
    known = (o < N)[:, None] & inside[None, :]
    where = q[None, :] + o[:, None] * AREA
    made_y = rectified(best, SIX).to(y.dtype.element_ty)
    tl.store(y + picture * (N * AREA) + where, made_y, mask=known)
    if KEEP:
        tl.store(place + picture * (N * AREA) + where, tl.where(shut(best, SIX), 255, spot).to(tl.uint8), mask=known)
    piece = picture * tl.num_programs(1) + tl.program_id(1)
    if TAPS > 0:
        share = tl.sum(tl.where(filled[None, :], acts, 0.0), 1) / (OH * OW)
        tl.store(mean + piece * N + o, share, mask=o < N)
        tl.store(entropy + piece, tl.sum(entropies, 0) / (OH * OW))
    if TAPS > 1:
        act = made_y.to(tl.float32)
        found, lse = _summary(act, N)
        tl.store(value + (HIGH * 2 * AREA + q), found, mask=inside)
        tl.store(log_sum + (HIGH * 2 * AREA + q), lse, mask=inside)
        piece += tl.num_programs(0).to(tl.int64) * tl.num_programs(1)
        share = tl.sum(tl.where(inside[None, :], act, 0.0), 1) / AREA
        tl.store(mean + piece * N + o, share, mask=o < N)
        tl.store(entropy + piece, tl.sum(tl.where(inside, found, 0.0), 0) / AREA)


@triton.jit(do_not_specialize=["turns"])
def _open_back(
    x, d, place, y, made, value, log_sum, d_mean, d_entropy, d_mean_y, d_entropy_y, parts, batch, each, turns,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, R: tl.constexpr,
    S: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, DH: tl.constexpr,
    DW: tl.constexpr, N: tl.constexpr, HIGH: tl.constexpr, SIX: tl.constexpr, TAPS: tl.constexpr,
    BO: tl.constexpr, BK: tl.constexpr, BQ: tl.constexpr,
):  # fmt: skip
    COLUMNS: tl.constexpr = OW // 2
    AREA: tl.constexpr = (OH // HIGH) * COLUMNS
    K: tl.constexpr = C * R * S
    CELLS: tl.constexpr = (2 * HIGH + TAPS - 1) * AREA
    client = tl.program_id(1).to(tl.int64)
    o = tl.arange(0, BO)
    k = tl.arange(0, BK)
    total = tl.zeros((BK, BO), tl.float32)
    first = tl.program_id(0) * each
    for turn in range(first, tl.minimum(first + each, batch * turns)):
        picture = client * batch + turn // turns
        # Of a number of turns that it knew, the compiler would compute places in 16 bits, two at a time, which ptxas 12.8 gets wrong.
        start = (turn % turns) * BQ
        tl.assume(start >= 0)
        p = 2 * start + tl.arange(0, 2 * BQ)
        filled = p < 2 * AREA
        both = (o < N)[:, None] & filled[None, :]
        q = start + tl.arange(0, BQ)
        inside = q < AREA
        known = (o < N)[:, None] & inside[None, :]
        where = o[:, None] * AREA + q[None, :]
        arrived = tl.load(d + picture * (N * AREA) + where, mask=known, other=0.0).to(tl.float32)
        chosen = tl.load(place + picture * (N * AREA) + where, mask=known, other=255)
        if TAPS > 0:
            level = (tl.load(d_mean + picture * N + o, mask=o < N, other=0.0) / (OH * OW))[:, None]
            share = tl.load(d_entropy + picture) / (OH * OW)
        if TAPS > 1:
            level_y = (tl.load(d_mean_y + picture * N + o, mask=o < N, other=0.0) / AREA)[:, None]
            share_y = tl.load(d_entropy_y + picture) / AREA
            act = tl.load(y + picture * (N * AREA) + where, mask=known, other=0.0).to(tl.float32)
            lse = tl.load(log_sum + picture * CELLS + (HIGH * 2 * AREA + q), mask=inside, other=0.0)[None, :]
            found = tl.load(value + picture * CELLS + (HIGH * 2 * AREA + q), mask=inside, other=0.0)[None, :]
            arrived += _gradient(act, lse, found, share_y, level_y)
        for high in tl.static_range(HIGH):
            top = ((p // (2 * COLUMNS)) * HIGH + high) * SH - PH
            along = (p % (2 * COLUMNS)) * SW - PW
            left = tl.where(chosen == 2 * high, arrived, 0.0)
            right = tl.where(chosen == 2 * high + 1, arrived, 0.0)
            slope = tl.reshape(tl.join(left, right), (BO, 2 * BQ))
            if TAPS > 0:
                at = (o * (HIGH * 2 * AREA))[:, None] + (high * (2 * AREA) + p)[None, :]
                z = tl.load(made + picture * (N * HIGH * 2 * AREA) + at, mask=both, other=0.0).to(tl.float32)
                at = high * (2 * AREA) + p
                lse = tl.load(log_sum + picture * CELLS + at, mask=filled, other=0.0)[None, :]
                found = tl.load(value + picture * CELLS + at, mask=filled, other=0.0)[None, :]
                slope += _gradient(rectified(z, SIX), lse, found, share, level)
                slope = tl.where(shut(z, SIX), 0.0, slope)
            slope = tl.trans(_rounded(slope.to(x.dtype.element_ty)))
            pixels = x + picture * (C * H * W)
            patch = patched(pixels, top * W + along, top, along, k, filled[None, :], C, H, W, R, S, PH, PW, DH, DW)
            patch = tl.where((k == K)[:, None], 1.0, patch).to(x.dtype.element_ty)  # the bias's
            total = tl.dot(patch, slope, total, input_precision="tf32")
    parts += ((client * tl.num_programs(0) + tl.program_id(0)) * N) * BK
    tl.store(parts + ((o * BK)[None, :] + k[:, None]), total, mask=(o < N)[None, :] & (k <= K)[:, None])


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def _crew(tall: int, warps: int, few: tuple[int, int] | None) -> dict[str, int]:
    """The warps of a program; up to 32 filters those that were measured, with as many registers for each thread as let more programs run at a time."""
    return {"num_warps": warps} if few is None or tall > 32 else {"num_warps": few[0], "maxnreg": few[1]}


def rounded(x: Tensor) -> Tensor:
    """What products in TF32 are to be given for a tensor without gaps; 16 bits as they are."""
    if x.dtype != torch.float32:
        return x
    y = torch.empty_like(x)
    _round[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), B=1024)
    return y


class Opened(NamedTuple):
    """What :func:`opened` returns.

    Args:
        y: the pooled map.
        place: of each window's maximum (255: no gradient), if it is to be kept.
        kept: for the way back, where summaries are asked for: what the ReLU is given, each position's negative entropy and ``log_sum``.
        summaries: means and negative entropies, map by map.
    """

    y: Tensor
    place: Tensor | None
    kept: tuple[Tensor, ...]
    summaries: tuple[Tensor, ...]


def opened(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    shape: Geometry,
    window: Pair,
    *,
    six: bool,
    keep: bool = False,
    taps: int = 0,
) -> Opened:
    """What a convolution, ReLU (of at most 6) and pooling return.

    Args:
        x: (clients, batch, channels, height, width), without gaps, from :func:`rounded`.
        w: (clients, outputs, channels, kernel height, kernel width), each client's without gaps; of shared ones the stride is 0.
        bias: (clients, outputs), likewise, or None.
        shape: of the convolution.
        window: height and width of the windows.
        six: whether the activation ends at 6.
        keep: whether the places of the maxima are wanted.
        taps: how many maps are summed up: none, what the ReLU returns (which the windows fill), or what the pooling returns too.
    """
    clients, batch = x.shape[:2]
    outputs, rows, columns = w.shape[1], shape.out[0] // window[0], shape.out[1] // window[1]
    pictures, area, slots = clients * batch, rows * columns, window[0] * window[1]
    y = x.new_empty(clients, batch, outputs, rows, columns)
    place = torch.empty_like(y, dtype=torch.uint8) if keep else None
    tall = max(16, triton.next_power_of_2(outputs))
    across = WINDOWS * 32 // max(32, tall) // (2 if taps and tall <= 32 else 1)
    across = max(16, min(across, triton.next_power_of_2(area)))
    pieces = triton.cdiv(area, across)
    large = tall > 32 and shape.inner > 64  # more than the registers of two warps hold
    kept: tuple[Tensor, ...] = ()
    sums: tuple[Tensor, ...] = ()
    if taps:
        assert shape.out == (rows * window[0], columns * window[1])
        each = x.new_empty(2, pictures, slots + taps - 1, area, dtype=torch.float32)
        kept = x.new_empty(pictures, outputs, slots, area), each[0], each[1]
        sums = each.new_empty(taps, clients, batch, pieces, outputs), each.new_empty(taps, clients, batch, pieces)
    _open[(pictures, pieces)](
        x, w, either(bias, x), y, either(place, x), *(*kept, *sums) or [x] * 5, batch, w.stride(0),
        0 if bias is None else bias.stride(0), **shape.sizes, N=outputs, HIGH=window[0],
        BIAS=bias is not None, SIX=six, KEEP=keep, TAPS=taps, BO=tall, BK=DEEP, BQ=across,
        **_crew(tall, 4 if taps or large else 2, (2, 168) if taps else None),
    )  # fmt: skip
    if not taps:
        return Opened(y, place, (), ())
    mean, entropy = (t.squeeze(3) if pieces == 1 else t.sum(3) for t in sums)
    return Opened(y, place, kept, tuple(t[i] for i in range(taps) for t in (mean, entropy)))


def opened_back(
    x: Tensor,
    d: Tensor,
    place: Tensor,
    shape: Geometry,
    window: Pair,
    y: Tensor | None = None,
    kept: Sequence[Tensor] = (),
    given: Sequence[Tensor] = (),
    *,
    six: bool,
) -> tuple[Tensor, Tensor]:
    """The gradients with respect to filters and biases.

    Args:
        x: as in :func:`opened`.
        d: the gradient of the pooled map, without gaps.
        place: the places of the maxima.
        shape: of the convolution.
        window: height and width of the windows.
        y: the pooled map, if it was summed up.
        kept: as in :class:`Opened`.
        given: the gradients of the summaries, without gaps.
        six: whether the activation ends at 6.
    """
    clients, batch, outputs = d.shape[:3]
    tall, deep = max(16, triton.next_power_of_2(outputs)), max(16, triton.next_power_of_2(shape.inner + 1))
    turns = triton.cdiv(d.shape[3] * d.shape[4], BACK)
    each = triton.cdiv(batch * turns, max(1, PROGRAMS * _processors(x.device) // clients))
    parts = x.new_empty(clients, triton.cdiv(batch * turns, each), outputs, deep, dtype=torch.float32)
    slopes = [*given, *[x] * (4 - len(given))]
    _open_back[(parts.shape[1], clients)](
        x, d, place, either(y, x), *kept or [x] * 3, *slopes, parts, batch, each, turns, **shape.sizes, N=outputs,
        HIGH=window[0], SIX=six, TAPS=len(given) // 2, BO=tall, BK=deep, BQ=BACK,
        **_crew(tall, 8 if given else 4, (4, 128)), num_stages=1,  # pipelines would copy four bytes at a time
    )  # fmt: skip
    total = parts.sum(1).to(d.dtype)
    kernel = (shape.channels, *shape.kernel)
    return total[..., : shape.inner].reshape(clients, outputs, *kernel), total[..., shape.inner]
