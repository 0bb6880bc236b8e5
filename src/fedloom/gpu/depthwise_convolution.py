"""Depthwise convolution of a cohort: each channel has its own filter.

    y[b, c, i, j] = bias[c] + sum_{r, s} w[c, r, s] x[b, c, i stride + r dilation - padding, j stride + s dilation - padding]

Torch's grouped convolution under ``vmap`` needs another order of the planes (a plane is one channel of one image), and its gradient
of the filters is slow. These kernels read the planes in their own order. The gradient of the filters consists of partial
sums that are joined in a fixed order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedloom.gpu.cohort import (
    accumulator_types,
    apply_to_cohort,
    contiguous_per_client,
    is_cohort_with_shared_filters,
    tensor_or,
    tile_shape,
)
from fedloom.gpu.conv_shapes import ConvParameters, ConvShape, output_size

MAX_FILTER = 63
"""Most values of a filter."""
MAX_VALUES = 2**31 - 1
"""Most values of a client's map: the kernels compute 32-bit indices within it."""
TILE = 1024
"""Pixels of a program."""
MAX_PROGRAMS = 4096
"""Most programs of the filters' gradient, unless there are more channels: enough for a large device."""


def depthwise_convolution(x: Tensor, w: Tensor, bias: Tensor | None, parameters: ConvParameters) -> Tensor | None:
    """Convolve the images of one client inside ``vmap``. Plain form: ``F.conv2d`` with one group per channel.

    Args:
        x: (batch, channels, height, width).
        w: (channels, 1, kernel height, kernel width). Clients may share filters and bias.
        bias: (channels,) or None.
        parameters: stride, padding and dilation.
    """
    fits = x.dim() == 4 and x.numel() and x.is_floating_point() and x.shape[1] == len(w) and w[0].numel() <= MAX_FILTER
    if not fits or not is_cohort_with_shared_filters(x, w, bias):
        return None
    out = output_size(x.shape[2:], w.shape[2:], parameters)
    if min(out) < 1 or max(x.numel(), x.shape[:2].numel() * out[0] * out[1]) > MAX_VALUES:
        return None  # torch raises the error, or computes 64-bit indices
    y: Tensor = apply_to_cohort(_CohortDepthwise, x, w, bias, parameters)
    return y


class _CohortDepthwise(torch.autograd.Function):
    """x: (clients, batch, channels, height, width); w: (clients, channels, 1, kernel height, kernel width); bias: (clients, channels)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, parameters: ConvParameters) -> Tensor:
        shape = ConvShape.of(x, w, parameters)
        # Of filters that all clients share the stride is 0.
        x, w, bias = x.contiguous(), contiguous_per_client(w), None if bias is None else contiguous_per_client(bias)
        ctx.shape, ctx.biased = shape, bias is not None
        ctx.save_for_backward(x, w)
        clients, batch, channels = x.shape[:3]
        y = x.new_empty(clients, batch, channels, *shape.out)
        planes, pixels, grid = tile_shape(batch * channels, shape.out[0] * shape.out[1], TILE)
        _forward_kernel[(*grid, clients)](
            x, w, tensor_or(bias, x), y, w.stride(0), 0 if bias is None else bias.stride(0), batch * channels,
            **shape.constants, BIAS=bias is not None, SUM=accumulator_types(x)[1], BP=planes, BQ=pixels, num_warps=4,
        )  # fmt: skip
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        dy, shape = dy.contiguous(), ctx.shape
        clients, batch, channels = dy.shape[:3]
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = dy.new_empty(x.shape)
            planes, pixels, grid = tile_shape(batch * channels, shape.height * shape.width, TILE)
            _input_gradient_kernel[(*grid, clients)](
                dy, w, dx, w.stride(0), batch * channels, **shape.constants, SUM=accumulator_types(dy)[1],
                BP=planes, BQ=pixels, num_warps=4,
            )  # fmt: skip
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            dw, db = _filter_gradients(x, dy, shape, biased=ctx.biased)
        return dx, dw, db, None


def _filter_gradients(x: Tensor, dy: Tensor, shape: ConvShape, *, biased: bool) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of filters (clients, channels, 1, kernel height, kernel width) and biases (clients, channels)."""
    clients, batch, channels = x.shape[:3]
    size = shape.kernel[0] * shape.kernel[1]
    images, pixels, (image_tiles, _) = tile_shape(batch, shape.out[0] * shape.out[1], TILE)
    parts = max(1, min(MAX_PROGRAMS // (clients * channels), image_tiles))
    length = triton.cdiv(triton.cdiv(batch, parts), images) * images
    parts = triton.cdiv(batch, length)
    dtype, triton_dtype = accumulator_types(x)
    partial = x.new_empty(clients, channels, parts, size + 1, dtype=dtype)
    _filter_gradient_kernel[(channels, parts, clients)](
        x, dy, partial, batch, length, **shape.constants, BIAS=int(biased), SUM=triton_dtype, BP=images, BQ=pixels,
        num_warps=4,
    )  # fmt: skip
    gradient = (partial[:, :, 0] if parts == 1 else partial.sum(2)).to(x.dtype)
    dw = gradient[..., :size].reshape(clients, channels, 1, *shape.kernel)
    return dw, gradient[..., size] if biased else None


@triton.jit
def _filter_product(
    source, w, plane, pixel, index, valid_plane, valid, C: tl.constexpr, AREA: tl.constexpr, FILTER_SIZE: tl.constexpr, SUM: tl.constexpr
):  # fmt: skip
    """Cells of planes of that area, each times one index of the plane's filter."""
    value = tl.load(source + (plane * AREA)[:, None] + pixel[None, :], mask=valid, other=0.0)
    weight = tl.load(w + (plane % C) * FILTER_SIZE + index, mask=valid_plane, other=0.0)
    return value.to(SUM) * weight.to(SUM)[:, None]


@triton.jit
def _forward_kernel(
    x, w, bias, y, w_stride, bias_stride, planes,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, R: tl.constexpr,
    S: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, DH: tl.constexpr,
    DW: tl.constexpr, BIAS: tl.constexpr, SUM: tl.constexpr, BP: tl.constexpr, BQ: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(2).to(tl.int64)
    plane = tl.program_id(0) * BP + tl.arange(0, BP)
    q = tl.program_id(1) * BQ + tl.arange(0, BQ)
    valid_plane = plane < planes
    valid = valid_plane[:, None] & (q < OH * OW)[None, :]
    x += client * planes * (H * W)
    w += client * w_stride
    total = tl.zeros((BP, BQ), SUM)
    if BIAS:
        total += tl.load(bias + client * bias_stride + plane % C, mask=valid_plane, other=0.0).to(SUM)[:, None]
    for r in tl.static_range(R):
        for s in tl.static_range(S):
            i = (q // OW) * SH + (r * DH - PH)
            j = (q % OW) * SW + (s * DW - PW)
            valid_input = valid & ((i >= 0) & (i < H) & (j >= 0) & (j < W))[None, :]
            total += _filter_product(x, w, plane, i * W + j, r * S + s, valid_plane, valid_input, C, H * W, R * S, SUM)
    y += client * planes * (OH * OW)
    tl.store(y + (plane * (OH * OW))[:, None] + q[None, :], total.to(y.dtype.element_ty), mask=valid)


@triton.jit
def _input_gradient_kernel(
    dy, w, dx, w_stride, planes,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, R: tl.constexpr,
    S: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, DH: tl.constexpr,
    DW: tl.constexpr, SUM: tl.constexpr, BP: tl.constexpr, BQ: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(2).to(tl.int64)
    plane = tl.program_id(0) * BP + tl.arange(0, BP)
    q = tl.program_id(1) * BQ + tl.arange(0, BQ)
    valid_plane = plane < planes
    valid = valid_plane[:, None] & (q < H * W)[None, :]
    dy += client * planes * (OH * OW)
    w += client * w_stride
    total = tl.zeros((BP, BQ), SUM)
    for r in tl.static_range(R):
        for s in tl.static_range(S):
            i = q // W + (PH - r * DH)
            j = q % W + (PW - s * DW)
            valid_output = (i >= 0) & (j >= 0) & (i % SH == 0) & (j % SW == 0)
            i, j = i // SH, j // SW
            valid_output = valid & (valid_output & (i < OH) & (j < OW))[None, :]
            total += _filter_product(
                dy, w, plane, i * OW + j, r * S + s, valid_plane, valid_output, C, OH * OW, R * S, SUM
            )
    dx += client * planes * (H * W)
    tl.store(dx + (plane * (H * W))[:, None] + q[None, :], total.to(dx.dtype.element_ty), mask=valid)


@triton.jit
def _filter_gradient_kernel(
    x, dy, partial, batch, length,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, R: tl.constexpr,
    S: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, DH: tl.constexpr,
    DW: tl.constexpr, BIAS: tl.constexpr, SUM: tl.constexpr, BP: tl.constexpr, BQ: tl.constexpr,
):  # fmt: skip
    channel, part, client = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    x += client * batch * (C * H * W)
    dy += client * batch * (C * OH * OW)
    partial += ((client * C + channel) * tl.num_programs(1) + part) * (R * S + 1)
    start = part * length
    end = tl.minimum(start + length, batch)
    # Place by index, each of which reads all planes: what belongs to a pixel is then found once for many pictures.
    for index in tl.static_range(R * S + BIAS):
        total = tl.zeros((BP, BQ), SUM)
        for offset in range(0, OH * OW, BQ):
            q = offset + tl.arange(0, BQ)
            i = (q // OW) * SH + ((index // S) * DH - PH)
            j = (q % OW) * SW + ((index % S) * DW - PW)
            valid_pixel = q < OH * OW
            if index < R * S:
                valid_pixel = valid_pixel & (i >= 0) & (i < H) & (j >= 0) & (j < W)
            for first_image in range(start, end, BP):
                image = first_image + tl.arange(0, BP)
                plane = image * C + channel
                valid = (image < end)[:, None] & valid_pixel[None, :]
                grad = tl.load(dy + (plane * (OH * OW))[:, None] + q[None, :], mask=valid, other=0.0).to(SUM)
                if index < R * S:
                    value = tl.load(x + (plane * (H * W))[:, None] + (i * W + j)[None, :], mask=valid, other=0.0)
                    total += value.to(SUM) * grad
                else:
                    total += grad
        tl.store(partial + index, tl.sum(tl.sum(total, 1), 0))
