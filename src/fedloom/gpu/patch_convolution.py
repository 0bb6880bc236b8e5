"""Convolution of a cohort as one batched matrix product over patches (im2col).

Under ``vmap`` torch computes a grouped convolution, which cuDNN runs one client at a time. For small layers the product over patches is
faster. With ``k = (c, r, s)`` over channels and positions of a filter, and ``p = (i, j)`` over output pixels of image ``b``,

    patches[k, b, p] = x[b, c, i stride + r dilation - padding, j stride + s dilation - padding]
    y[o, b, p] = sum_k w[o, k] patches[k, b, p]

The matrix has one more row of ones for the bias, and rows of zeros up to a multiple of eight for fast products.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from fedloom.gpu.cohort import accumulator_types, apply_to_cohort, client_count, is_cohort
from fedloom.gpu.conv_shapes import ConvParameters, ConvShape, conv_parameters, output_size
from fedloom.gpu.depthwise_convolution import depthwise_convolution
from fedloom.ops.precision import tf32

PATCH_BYTES = 32 << 20
"""Most bytes of one client's patches; beyond that cuDNN was faster on an H200."""
LARGE_FILTERS = 25
LARGE_FILTER_PATCH_BYTES = 48 << 20
"""The limit for filters of at least 5 x 5."""
FEW_CLIENTS = 8
FEW_CLIENTS_PATCH_BYTES = 80 << 20
"""The limit for fewer clients than these, and for training layers with more outputs than inputs: cuDNN is slow for both."""
SAVED_BYTES = 1 << 30
"""Most bytes of patches that a layer saves for its backward pass; beyond that the backward pass computes them again."""
SMALL_FILTERS = 4096
"""Up to this size of a client's filters there is one product per image, which saves two transpositions."""


def convolution(layer: nn.Conv2d, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor | None:
    """Convolve the images of one client inside ``vmap``. Plain form: :func:`fedloom.network.layers.convolution`."""
    parameters = conv_parameters(layer)
    if parameters is None or x.dim() != 4:
        return None
    convolve = patch_convolution if layer.groups == 1 else depthwise_convolution
    return convolve(x, w, bias, parameters)


def patch_convolution(x: Tensor, w: Tensor, bias: Tensor | None, parameters: ConvParameters) -> Tensor | None:
    """Convolve with one group, up to the limits above. Plain form: ``F.conv2d``.

    Args:
        x: (batch, channels, height, width).
        w: (outputs, channels, kernel height, kernel width).
        bias: (outputs,) or None.
        parameters: stride, padding and dilation.
    """
    # For one client cuDNN is as fast and needs no compilation.
    if not x.numel() or not is_cohort(x, w, bias) or client_count(x) == 1:
        return None
    rows, columns = output_size(x.shape[2:], w.shape[2:], parameters)
    limit = LARGE_FILTER_PATCH_BYTES if w.shape[2:].numel() >= LARGE_FILTERS else PATCH_BYTES
    widening = w.shape[0] > w.shape[1] and torch.is_grad_enabled()
    limit = FEW_CLIENTS_PATCH_BYTES if client_count(x) < FEW_CLIENTS or widening else limit
    if w.shape[1:].numel() * x.shape[0] * rows * columns * x.element_size() > limit:
        return None
    y: Tensor = apply_to_cohort(_CohortConvolution, x, w, bias, parameters)
    return y


class _CohortConvolution(torch.autograd.Function):
    """x: (clients, batch, channels, height, width); w: (clients, outputs, channels, kernel height, kernel width)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, parameters: ConvParameters) -> Tensor:
        clients, batch, outputs = *x.shape[:2], w.shape[1]
        per_image = w[0].numel() <= SMALL_FILTERS
        shape = ConvShape.of(x, w, parameters, bias=bias is not None, per_image=per_image)
        x = x.contiguous()
        matrix = _filter_matrix(w, bias, shape.matrix_rows)
        patches = _unfold(x, shape)
        ctx.shape, ctx.size, ctx.tf32 = shape, x.shape, torch.backends.cudnn.allow_tf32
        save = patches.numel() * patches.element_size() <= SAVED_BYTES
        ctx.save_for_backward(matrix, patches if save else None, None if save else x)
        y = x.new_empty(clients, batch, outputs, *shape.out)  # not a view: the next layer may work in place
        with tf32(products=ctx.tf32):
            if per_image:
                filters = matrix[:, None].expand(-1, batch, -1, -1).flatten(0, 1)
                torch.bmm(filters, patches.flatten(0, 1), out=y.view(clients * batch, outputs, -1))
            else:
                product = torch.bmm(matrix, patches).view(clients, outputs, batch, *shape.out)
                y.copy_(product.transpose(1, 2))
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        matrix, patches, x = ctx.saved_tensors
        shape, size = ctx.shape, ctx.size
        clients, batch, outputs = dy.shape[:3]
        dx = dw = db = None
        if shape.per_image:
            d = dy.reshape(clients * batch, outputs, -1)
        else:
            d = dy.transpose(1, 2).reshape(clients, outputs, -1)
        with tf32(products=ctx.tf32):
            if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
                patches = _unfold(x, shape) if patches is None else patches
                if shape.per_image:
                    per_image = torch.bmm(d, patches.flatten(0, 1).transpose(1, 2))
                    gradient = per_image.view(clients, batch, outputs, -1).sum(1)
                else:
                    gradient = torch.bmm(d, patches.transpose(1, 2))
                dw = gradient[..., : shape.patch_size].reshape(clients, outputs, size[2], *shape.kernel)
                db = gradient[..., shape.patch_size] if shape.bias else None
            if ctx.needs_input_grad[0]:
                filters = matrix.transpose(1, 2)
                if shape.per_image:
                    filters = filters[:, None].expand(-1, batch, -1, -1).flatten(0, 1)
                dx = _fold(torch.bmm(filters, d), size, shape)
        return dx, dw, db, None


def _filter_matrix(w: Tensor, bias: Tensor | None, rows: int) -> Tensor:
    """Return the filters as a matrix (clients, outputs, rows): filter, bias, zeros."""
    parts = [w.flatten(2)] if bias is None else [w.flatten(2), bias[..., None]]
    used = sum(p.shape[2] for p in parts)
    if rows > used:
        parts.append(w.new_zeros(*w.shape[:2], rows - used))
    return torch.cat(parts, 2)


def _unfold(x: Tensor, shape: ConvShape) -> Tensor:
    """Return the patches of images (clients, batch, channels, height, width), contiguous.

    Their shape is (clients, rows, batch * pixels), or (clients, batch, rows, pixels) with ``per_image``.
    """
    clients, batch = x.shape[:2]
    area = shape.out[0] * shape.out[1]
    pixels, rows = batch * area, shape.matrix_rows
    out = x.new_empty((clients, batch, rows, area) if shape.per_image else (clients, rows, pixels))
    _unfold_kernel[(triton.cdiv(pixels, 256), triton.cdiv(rows, 8), clients)](
        x, out, pixels, **shape.constants, K=rows, PER_IMAGE=shape.per_image, ONES=shape.bias, BK=8, BP=256, num_warps=4
    )
    return out


def _fold(d: Tensor, size: torch.Size, shape: ConvShape) -> Tensor:
    """Add the gradients of patches to the pixels from which they come."""
    clients, batch = size[:2]
    dx = d.new_empty(size)
    values = dx[0].numel()
    pixels = batch * shape.out[0] * shape.out[1]
    _fold_kernel[(triton.cdiv(values, 512), clients)](
        d, dx, values, pixels, **shape.constants, K=shape.matrix_rows, PER_IMAGE=shape.per_image,
        SUM=accumulator_types(d)[1], BQ=512, num_warps=4,
    )  # fmt: skip
    return dx


@triton.jit
def load_patches(
    source, pixel_offset, top, left, k, valid,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, R: tl.constexpr, S: tl.constexpr, PH: tl.constexpr,
    PW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr,
):  # fmt: skip
    """Rows k of the patches whose corners are at (top, left), addresses ``source + pixel_offset``; zeros outside of pictures and where not ``valid``."""
    c, r, s = k // (R * S), (k % (R * S)) // S, k % S
    valid_value = valid & (k < C * R * S)[:, None]
    if PH > 0:
        i = top[None, :] + (r * DH)[:, None]
        valid_value = valid_value & (i >= 0) & (i < H)
    if PW > 0:
        j = left[None, :] + (s * DW)[:, None]
        valid_value = valid_value & (j >= 0) & (j < W)
    # A sum of a part for the pixel_offset and a part for the row_offset: one addition per element.
    row_offset = c * (H * W) + (r * DH) * W + s * DW
    return tl.load(source + (pixel_offset[None, :] + row_offset[:, None]), mask=valid_value, other=0.0)


@triton.jit
def _unfold_kernel(
    x, out, pixels,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, R: tl.constexpr,
    S: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, DH: tl.constexpr,
    DW: tl.constexpr, K: tl.constexpr, PER_IMAGE: tl.constexpr, ONES: tl.constexpr, BK: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(2).to(tl.int64)
    q = tl.program_id(0) * BP + tl.arange(0, BP)
    k = tl.program_id(1) * BK + tl.arange(0, BK)
    image, p = q // (OH * OW), q % (OH * OW)
    top, left = (p // OW) * SH - PH, (p % OW) * SW - PW
    valid = (q < pixels)[None, :] & (k < K)[:, None]
    source = x + client * (pixels // (OH * OW)) * (C * H * W)
    pixel_offset = image * (C * H * W) + top * W + left
    value = load_patches(source, pixel_offset, top, left, k, valid, C, H, W, R, S, PH, PW, DH, DW)
    if ONES:
        value = tl.where((k == C * R * S)[:, None], 1.0, value)
    if PER_IMAGE:
        index = (image * (K * OH * OW) + p)[None, :] + (k * (OH * OW))[:, None]
    else:
        index = q[None, :] + k[:, None] * pixels
    tl.store(out + client * pixels * K + index, value, mask=valid)


@triton.jit
def _fold_kernel(
    d, dx, values, pixels,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, R: tl.constexpr,
    S: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, DH: tl.constexpr,
    DW: tl.constexpr, K: tl.constexpr, PER_IMAGE: tl.constexpr, SUM: tl.constexpr, BQ: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(1).to(tl.int64)
    q = tl.program_id(0) * BQ + tl.arange(0, BQ)
    image, c = q // (C * H * W), (q // (H * W)) % C
    h, w = (q // W) % H + PH, q % W + PW
    d += client * pixels * K
    total = tl.zeros((BQ,), SUM)
    for r in tl.static_range(R):
        for s in tl.static_range(S):
            i, j = h - r * DH, w - s * DW
            valid = (q < values) & (i >= 0) & (j >= 0) & (i % SH == 0) & (j % SW == 0)
            i, j = i // SH, j // SW
            valid = valid & (i < OH) & (j < OW)
            k = (c * R + r) * S + s
            if PER_IMAGE:
                index = (image * K + k) * (OH * OW) + i * OW + j
            else:
                index = k * pixels + image * (OH * OW) + i * OW + j
            total += tl.load(d + index, mask=valid, other=0.0).to(SUM)
    tl.store(dx + client * values + q, total.to(dx.dtype.element_ty), mask=q < values)
