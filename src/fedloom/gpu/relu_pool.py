"""[Batch normalisation,] ReLU and max pooling of a cohort in one kernel each way.

Windows do not overlap. With ``v`` the normalised input (or ``x``),

    y_w = relu(max_{p in w} v_p)      dv_p = dy_w [p = argmax, the first one] [v_p > 0]

so that neither ``v`` nor ``relu(v)`` is ever in memory. The forward kernel saves the index of each window's maximum in one byte
(255 where the ReLU blocks the gradient), and with normalisation ``x`` at that index. The gradient of ReLU and pooling alone
does not need ``x``.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedloom.gpu.batch_norm import affine_gradients, channel_statistics, gradient_sums, normalise_value
from fedloom.gpu.cohort import accumulator_types, apply_to_cohort, relu, relu_is_flat, tensor_or, tile_shape
from fedloom.gpu.conv_shapes import Pair

TILE = 1024
"""Pixels of a program, or half as many windows."""
Norm = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""Mean, scale, weight and bias of a normalisation, each (clients, channels)."""


def relu_pool(x: Tensor, window: Pair, *, relu6: bool = False) -> Tensor:
    """Apply ReLU and max pooling to one client's maps inside ``vmap``. Plain form: ``nn.ReLU``, ``nn.MaxPool2d``.

    Args:
        x: (batch, channels, height, width).
        window: height and width of the windows.
        relu6: whether the ReLU is ReLU6.
    """
    y: Tensor = apply_to_cohort(_CohortReluPool, x, window, relu6, torch.is_grad_enabled())
    return y


def norm_relu_pool(
    x: Tensor,
    mask: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    window: Pair = (1, 1),
    *,
    relu6: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Apply batch normalisation, ReLU and max pooling to one client's maps inside ``vmap``.

    Plain form: :func:`fedloom.network.layers.batch_norm`, ``nn.ReLU``, ``nn.MaxPool2d``.

    Args:
        x: (batch, channels, height, width).
        mask: (batch,), 1 for real rows, 0 for padding; None if every row is real.
        weight: (channels,) or None.
        bias: (channels,) or None.
        eps: added to the variance.
        window: height and width of the windows; (1, 1) for no pooling.
        relu6: whether the ReLU is ReLU6.

    Returns:
        Output; mean, variance and number of values per channel before normalisation.
    """
    save = torch.is_grad_enabled()
    y, mean, var, count = apply_to_cohort(_CohortNormReluPool, x, mask, weight, bias, eps, window, relu6, save)
    return y, mean, var, count


class _CohortReluPool(torch.autograd.Function):
    """x: (clients, batch, channels, height, width)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, window: Pair, relu6: bool, save: bool) -> Tensor:
        y, argmax, _ = _forward(x.contiguous(), window, None, relu6=relu6, save=save)
        ctx.save_for_backward(argmax)
        ctx.window, ctx.size = window, x.shape
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (argmax,) = ctx.saved_tensors
        height, width = ctx.size[3:]
        dx = dy.new_empty(ctx.size)
        size = dx[0].numel()
        _unpool_kernel[(triton.cdiv(size, 1024), len(dx))](
            dy.contiguous(), argmax, dx, size, H=height, W=width, OH=dy.shape[3], OW=dy.shape[4],
            R=ctx.window[0], S=ctx.window[1], BQ=1024, num_warps=4,
        )  # fmt: skip
        return dx, None, None, None


class _CohortNormReluPool(torch.autograd.Function):
    """x: (clients, batch, channels, height, width); mask: (clients, batch); weight and bias: (clients, channels)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        mask: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        window: Pair,
        relu6: bool,
        save: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x = x.contiguous()
        mask, weight, bias = (None if t is None else t.contiguous() for t in (mask, weight, bias))
        mean, var, count = channel_statistics(x.flatten(3), mask)
        scale = torch.rsqrt(var + eps)
        y, argmax, maxima = _forward(x, window, (mean, scale, weight, bias), relu6=relu6, save=save)
        if save:
            ctx.save_for_backward(x, argmax, maxima, mask, weight, bias, mean, scale, count.clamp(min=1))
        ctx.window, ctx.relu6 = window, relu6
        ctx.mark_non_differentiable(mean, var, count)
        return y, mean, var, count

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, argmax, maxima, mask, weight, bias, mean, scale, count = ctx.saved_tensors
        dy, window = dy.contiguous(), ctx.window
        # A window's gradient arrives at its maximum only: the sums need no other value of x.
        values = x if maxima is None else maxima
        sums = gradient_sums(
            values.flatten(3), dy.flatten(3), mean, scale, weight, bias, behind_relu=True, relu6=ctx.relu6
        )
        clients, batch, channels, height, width = x.shape
        dx = torch.empty_like(x)
        planes, pixels, grid = tile_shape(batch * channels, height * width, TILE)
        _norm_backward_kernel[(*grid, clients)](
            x, dy, tensor_or(argmax, x), dx, tensor_or(mask, x), mean, scale, tensor_or(weight, x), tensor_or(bias, x),
            sums, count, batch, channels, H=height, W=width, OH=dy.shape[3], OW=dy.shape[4], R=window[0], S=window[1],
            POOL=argmax is not None, AFFINE=weight is not None, MASKED=mask is not None, RELU6=ctx.relu6,
            SUM=accumulator_types(x)[1], BP=planes, BQ=pixels, num_warps=4,
        )  # fmt: skip
        return dx, None, *affine_gradients(sums, weight), None, None, None, None


def _forward(
    x: Tensor, window: Pair, norm: Norm | None, *, relu6: bool, save: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the output, the index of each window's maximum (255: no gradient) and ``x`` at that index.

    Args:
        x: (clients, batch, channels, height, width), contiguous.
        window: height and width of the windows; (1, 1) for no pooling.
        norm: of the normalisation; None for ReLU and pooling alone.
        relu6: whether the ReLU is ReLU6.
        save: whether to return index and ``x``. Without pooling both are None.
    """
    clients, batch, channels, height, width = x.shape
    rows, columns = height // window[0], width // window[1]
    y = x.new_empty(clients, batch, channels, rows, columns)
    save = save and window != (1, 1)
    argmax = torch.empty_like(y, dtype=torch.uint8) if save else None
    maxima = torch.empty_like(y) if save and norm is not None else None
    mean, scale, weight, bias = (None,) * 4 if norm is None else norm
    planes, pixels, grid = tile_shape(batch * channels, rows * columns, TILE if window == (1, 1) else TILE // 2)
    _forward_kernel[(*grid, clients)](
        x, y, tensor_or(argmax, x), tensor_or(maxima, x), tensor_or(mean, x), tensor_or(scale, x), tensor_or(weight, x),
        tensor_or(bias, x), batch * channels, channels, H=height, W=width, OH=rows, OW=columns, R=window[0], S=window[1],
        NORM=norm is not None, AFFINE=weight is not None, RELU6=relu6, SAVE=save, SUM=accumulator_types(x)[1],
        BP=planes, BQ=pixels, num_warps=4,
    )  # fmt: skip
    return y, argmax, maxima


@triton.jit
def _relu_input(x, mean, scale, weight, bias, NORM: tl.constexpr, AFFINE: tl.constexpr, SUM: tl.constexpr):
    """What a ReLU is given: x, or x normalised."""
    if NORM:
        value = normalise_value(x, mean, scale, weight, bias, AFFINE, SUM)
    else:
        value = x.to(SUM)
    return value


@triton.jit
def update_maximum(
    x, maximum, x_at_maximum, argmax, mean, scale, weight, bias,
    INDEX: tl.constexpr, NORM: tl.constexpr, AFFINE: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """The maximum of a window so far after one more place of it: the first of equal ones, NaN above all."""
    value = _relu_input(x, mean, scale, weight, bias, NORM, AFFINE, SUM)
    if INDEX == 0:
        maximum = value
        x_at_maximum = x
    else:
        larger = (value > maximum) | (value != value)
        maximum = tl.where(larger, value, maximum)
        x_at_maximum = tl.where(larger, x, x_at_maximum)
        argmax = tl.where(larger, INDEX, argmax).to(tl.uint8)
    return maximum, x_at_maximum, argmax


@triton.jit
def _forward_kernel(
    x, y, argmax, maxima, mean, scale, weight, bias, planes, channels,
    H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
    NORM: tl.constexpr, AFFINE: tl.constexpr, RELU6: tl.constexpr, SAVE: tl.constexpr, SUM: tl.constexpr,
    BP: tl.constexpr, BQ: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(2).to(tl.int64)
    plane = tl.program_id(0) * BP + tl.arange(0, BP)
    q = tl.program_id(1) * BQ + tl.arange(0, BQ)
    valid_plane = plane < planes
    valid = valid_plane[:, None] & (q < OH * OW)[None, :]
    x += client * planes * (H * W)
    channel_mean = 0.0
    channel_scale = 1.0
    channel_weight = 1.0
    channel_bias = 0.0
    if NORM:
        channel = client * channels + plane % channels
        channel_mean = tl.load(mean + channel, mask=valid_plane, other=0.0)[:, None]
        channel_scale = tl.load(scale + channel, mask=valid_plane, other=0.0)[:, None]
        if AFFINE:
            channel_weight = tl.load(weight + channel, mask=valid_plane, other=0.0).to(SUM)[:, None]
            channel_bias = tl.load(bias + channel, mask=valid_plane, other=0.0).to(SUM)[:, None]
    maximum = tl.zeros((BP, BQ), SUM)
    x_at_maximum = tl.zeros((BP, BQ), x.dtype.element_ty)
    window_argmax = tl.zeros((BP, BQ), tl.uint8)
    if S == 2:
        # Both columns of a window come with one load of neighbours, which a thread then takes apart.
        p = tl.program_id(1) * (2 * BQ) + tl.arange(0, 2 * BQ)
        valid_pair = valid_plane[:, None] & (p < OH * OW * 2)[None, :]
        pixel = (plane * (H * W))[:, None] + ((p // (2 * OW)) * (R * W) + p % (2 * OW))[None, :]
        for r in tl.static_range(R):
            pair = tl.load(x + (pixel + r * W), mask=valid_pair, other=0.0)
            left, right = tl.split(tl.reshape(pair, (BP, BQ, 2)))
            maximum, x_at_maximum, window_argmax = update_maximum(
                left,
                maximum,
                x_at_maximum,
                window_argmax,
                channel_mean,
                channel_scale,
                channel_weight,
                channel_bias,
                r * 2,
                NORM,
                AFFINE,
                SUM,
            )
            maximum, x_at_maximum, window_argmax = update_maximum(
                right,
                maximum,
                x_at_maximum,
                window_argmax,
                channel_mean,
                channel_scale,
                channel_weight,
                channel_bias,
                r * 2 + 1,
                NORM,
                AFFINE,
                SUM,
            )
    else:
        first_pixel = (plane * (H * W))[:, None] + ((q // OW) * (R * W) + (q % OW) * S)[None, :]
        for r in tl.static_range(R):
            for s in tl.static_range(S):
                value = tl.load(x + (first_pixel + (r * W + s)), mask=valid, other=0.0)
                maximum, x_at_maximum, window_argmax = update_maximum(
                    value,
                    maximum,
                    x_at_maximum,
                    window_argmax,
                    channel_mean,
                    channel_scale,
                    channel_weight,
                    channel_bias,
                    r * S + s,
                    NORM,
                    AFFINE,
                    SUM,
                )
    offset = client * planes * (OH * OW)
    y += offset
    index = (plane * (OH * OW))[:, None] + q[None, :]
    tl.store(y + index, relu(maximum, RELU6).to(y.dtype.element_ty), mask=valid)
    if SAVE:
        argmax += offset
        tl.store(argmax + index, tl.where(relu_is_flat(maximum, RELU6), 255, window_argmax).to(tl.uint8), mask=valid)
        if NORM:
            maxima += offset
            tl.store(maxima + index, x_at_maximum, mask=valid)


@triton.jit
def _unpool_kernel(
    dy, argmax, dx, size,
    H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
    BQ: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(1).to(tl.int64)
    q = tl.program_id(0) * BQ + tl.arange(0, BQ)
    outputs = (size // (H * W)) * (OH * OW)
    dy += client * outputs
    argmax += client * outputs
    dx += client * size
    plane, h, w = q // (H * W), (q // W) % H, q % W
    i, j = h // R, w // S
    valid = (q < size) & (i < OH) & (j < OW)
    index = plane * (OH * OW) + i * OW + j
    maximum_index = tl.load(argmax + index, mask=valid, other=255)
    grad = tl.load(dy + index, mask=valid, other=0.0)
    grad = tl.where(maximum_index == (h % R) * S + w % S, grad, 0.0)
    tl.store(dx + q, grad, mask=q < size)


@triton.jit
def _norm_backward_kernel(
    x, dy, argmax, dx, mask, mean, scale, weight, bias, sums, count, batch, channels,
    H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
    POOL: tl.constexpr, AFFINE: tl.constexpr, MASKED: tl.constexpr, RELU6: tl.constexpr, SUM: tl.constexpr,
    BP: tl.constexpr, BQ: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(2).to(tl.int64)
    planes = batch * channels
    plane = tl.program_id(0) * BP + tl.arange(0, BP)
    q = tl.program_id(1) * BQ + tl.arange(0, BQ)
    valid_plane = plane < planes
    valid = valid_plane[:, None] & (q < H * W)[None, :]
    offset = client * planes * (H * W)
    x += offset
    dx += offset
    index = (plane * (H * W))[:, None] + q[None, :]
    value = tl.load(x + index, mask=valid, other=0.0)
    channel = client * channels + plane % channels
    channel_mean = tl.load(mean + channel, mask=valid_plane, other=0.0)[:, None]
    channel_scale = tl.load(scale + channel, mask=valid_plane, other=0.0)[:, None]
    sum_dy = tl.load(sums + channel * 2, mask=valid_plane, other=0.0)[:, None]
    sum_dy_z = tl.load(sums + channel * 2 + 1, mask=valid_plane, other=0.0)[:, None]
    channel_weight = channel_scale
    channel_bias = channel_mean
    grad_scale = channel_scale
    if AFFINE:
        channel_weight = tl.load(weight + channel, mask=valid_plane, other=0.0).to(SUM)[:, None]
        channel_bias = tl.load(bias + channel, mask=valid_plane, other=0.0).to(SUM)[:, None]
        grad_scale = channel_scale * channel_weight
    if POOL:
        h, w = q // W, q % W
        i, j = h // R, w // S
        valid_window = valid & ((i < OH) & (j < OW))[None, :]
        argmax += client * planes * (OH * OW)
        dy += client * planes * (OH * OW)
        window_index = (plane * (OH * OW))[:, None] + (i * OW + j)[None, :]
        maximum_index = tl.load(argmax + window_index, mask=valid_window, other=255)
        grad = tl.load(dy + window_index, mask=valid_window, other=0.0).to(SUM)
        grad = tl.where(maximum_index == ((h % R) * S + w % S)[None, :], grad, 0.0)
    else:
        dy += offset
        grad = tl.load(dy + index, mask=valid, other=0.0).to(SUM)
        grad = tl.where(
            relu_is_flat(
                normalise_value(value, channel_mean, channel_scale, channel_weight, channel_bias, AFFINE, SUM), RELU6
            ),
            0.0,
            grad,
        )
    row_share = 1.0 / tl.load(count + client)
    if MASKED:
        row_share = (
            row_share * tl.load(mask + client * batch + plane // channels, mask=valid_plane, other=0.0).to(SUM)[:, None]
        )
    z = (value.to(SUM) - channel_mean) * channel_scale
    grad_x = grad_scale * (grad - row_share * (sum_dy + z * sum_dy_z))
    tl.store(dx + index, grad_x.to(dx.dtype.element_ty), mask=valid)
