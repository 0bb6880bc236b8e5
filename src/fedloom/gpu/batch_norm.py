"""Batch normalisation of a cohort, with the statistics of the real rows of every client and channel.

With weight ``m_b`` (1 for a real row, 0 for padding) and ``n = sum m_b pixels``:

    mean = sum m x / n      var = sum m (x - mean)^2 / n      z = (x - mean) / sqrt(var + eps)      y = z weight + bias
    dx = weight / sqrt(var + eps) (dy - m/n (sum dy + z sum dy z))      dweight = sum dy z      dbias = sum dy

Programs compute partial sums; the kernel joins them in a fixed order (Chan's formula for the variance).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from fedloom.gpu.cohort import accumulator_types, apply_to_cohort, is_cohort, relu_is_flat, tensor_or
from fedloom.ops.forward_context import Frame

BLOCK = 1024
"""Values that a program reads at a time."""


def batch_norm(norm: nn.modules.batchnorm._BatchNorm, x: Tensor, frame: Frame) -> Tensor | None:
    """Normalise x (batch, channels, ...) and update the layer's statistics. Plain form: :func:`fedloom.network.layers.batch_norm`."""
    if x.dim() < 3 or not can_normalise(norm, x, frame):
        return None
    y, mean, var, count = normalise(x, frame.mask, norm.weight, norm.bias, norm.eps)
    if norm.training and norm.running_mean is not None:
        norm._track(mean, var, count)  # type: ignore[operator]
    return y


def can_normalise(norm: nn.modules.batchnorm._BatchNorm, x: Tensor, frame: Frame) -> bool:
    """Return whether kernels support a normalisation by batch. Clients may share weight and bias."""
    return is_cohort(x, frame.mask, shared=[t for t in (norm.weight, norm.bias) if t is not None])


def normalise(
    x: Tensor, mask: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Normalise the batch of one client inside ``vmap``.

    Args:
        x: (batch, channels, ...).
        mask: (batch,), 1 for real rows, 0 for padding; None if every row is real.
        weight: (channels,) or None.
        bias: (channels,) or None.
        eps: added to the variance.

    Returns:
        Output; mean and variance (channels,); number of values per channel ().
    """
    y, mean, var, count = apply_to_cohort(_CohortBatchNorm, x, mask, weight, bias, eps)
    return y, mean, var, count


class _CohortBatchNorm(torch.autograd.Function):
    """x: (clients, batch, channels, ...); mask: (clients, batch); weight and bias: (clients, channels)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, mask: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        flat = x.reshape(*x.shape[:3], -1).contiguous()
        mask, weight, bias = (None if t is None else t.contiguous() for t in (mask, weight, bias))
        mean, var, count = channel_statistics(flat, mask)
        scale = torch.rsqrt(var + eps)
        y = x.new_empty(x.shape)
        size = flat[0].numel()
        _apply_kernel[(triton.cdiv(size, BLOCK), len(x))](
            flat, y, mean, scale, tensor_or(weight, x), tensor_or(bias, x), x.shape[1], x.shape[2], size,
            HW=flat.shape[3], AFFINE=weight is not None, SUM=accumulator_types(x)[1], BQ=BLOCK, num_warps=4,
        )  # fmt: skip
        ctx.save_for_backward(flat, mask, weight, mean, scale, count.clamp(min=1))
        ctx.mark_non_differentiable(mean, var, count)
        return y, mean, var, count

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, mask, weight, mean, scale, count = ctx.saved_tensors
        grad = dy.reshape(x.shape).contiguous()
        sums = gradient_sums(x, grad, mean, scale)
        dx = torch.empty_like(x)
        size = x[0].numel()
        _backward_kernel[(triton.cdiv(size, BLOCK), len(x))](
            x, grad, dx, tensor_or(mask, x), mean, scale, tensor_or(weight, x), sums, count, x.shape[1], x.shape[2], size,
            HW=x.shape[3], AFFINE=weight is not None, MASKED=mask is not None, SUM=accumulator_types(x)[1], BQ=BLOCK,
            num_warps=4,
        )  # fmt: skip
        return dx.view(dy.shape), None, *affine_gradients(sums, weight), None


def channel_statistics(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean and variance (clients, channels) and the number of values (clients,).

    Args:
        x: (clients, batch, channels, pixels), contiguous.
        mask: (clients, batch), contiguous, or None.
    """
    clients, batch, channels, pixels = x.shape
    dtype, triton_dtype = accumulator_types(x)
    parts, length = _split_sums(clients, channels, batch * pixels)
    partial = torch.empty((clients, channels, parts, 3), dtype=dtype, device=x.device)
    _partial_statistics_kernel[(channels, parts, clients)](
        x, tensor_or(mask, x), partial, batch, channels, length,
        HW=pixels, MASKED=mask is not None, SUM=triton_dtype, BQ=BLOCK, num_warps=4,
    )  # fmt: skip
    mean, var = (torch.empty((clients, channels), dtype=dtype, device=x.device) for _ in range(2))
    count = torch.empty(clients, dtype=dtype, device=x.device)
    _join_statistics_kernel[(triton.cdiv(channels, 128), clients)](
        partial, mean, var, count, channels, PARTS=parts, SUM=triton_dtype, BC=128, num_warps=4
    )
    return mean, var, count


def gradient_sums(
    x: Tensor,
    dy: Tensor,
    mean: Tensor,
    scale: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    behind_relu: bool = False,
    relu6: bool = False,
) -> Tensor:
    """Return ``(sum dy, sum dy z)``, the gradients of bias and weight, shape (clients, channels, 2).

    Args:
        x: (clients, batch, channels, pixels), contiguous.
        dy: gradient of the output, of the same shape.
        mean: (clients, channels).
        scale: ``1 / sqrt(var + eps)``, (clients, channels).
        weight: needed with ``behind_relu``.
        bias: needed with ``behind_relu``.
        behind_relu: whether ``dy`` is the gradient of a ReLU's output; the kernel then applies the ReLU's.
        relu6: whether this ReLU is ReLU6.
    """
    clients, batch, channels, pixels = x.shape
    dtype, triton_dtype = accumulator_types(x)
    parts, length = _split_sums(clients, channels, batch * pixels)
    partial = torch.empty((clients, channels, parts, 2), dtype=dtype, device=x.device)
    _gradient_sums_kernel[(channels, parts, clients)](
        x, dy, mean, scale, tensor_or(weight, x), tensor_or(bias, x), partial, batch, channels, length,
        HW=pixels, BEHIND_RELU=behind_relu, AFFINE=weight is not None, RELU6=relu6, SUM=triton_dtype, BQ=BLOCK, num_warps=4,
    )  # fmt: skip
    return partial.sum(2)


def affine_gradients(sums: Tensor, weight: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of weight and bias from :func:`gradient_sums`; None for a layer without them."""
    return (None, None) if weight is None else (sums[..., 1].to(weight.dtype), sums[..., 0].to(weight.dtype))


def _split_sums(clients: int, channels: int, size: int) -> tuple[int, int]:
    """Return the number of partial sums per channel and their length: enough programs for a large device."""
    parts = max(1, min(2048 // (clients * channels), size // (4 * BLOCK)))
    length = triton.cdiv(triton.cdiv(size, parts), BLOCK) * BLOCK
    return triton.cdiv(size, length), length


@triton.jit
def _partial_statistics_kernel(
    x,
    mask,
    partial,
    batch,
    channels,
    length,
    HW: tl.constexpr,
    MASKED: tl.constexpr,
    SUM: tl.constexpr,
    BQ: tl.constexpr,
):
    channel, part, client = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    x += client * batch * channels * HW
    size = batch * HW
    start = part * length
    end = tl.minimum(start + length, size)
    count = tl.zeros((), SUM)
    mean = tl.zeros((), SUM)
    square = tl.zeros((), SUM)
    for offset in range(start, end, BQ):
        q = offset + tl.arange(0, BQ)
        valid = q < end
        b = q // HW
        value = tl.load(x + (b * channels + channel) * HW + q % HW, mask=valid, other=0.0).to(SUM)
        if MASKED:
            weight = tl.load(mask + client * batch + b, mask=valid, other=0.0).to(SUM)
        else:
            weight = valid.to(SUM)
        n = tl.sum(weight, 0)
        block_mean = tl.sum(value * weight, 0) / tl.maximum(n, 1)
        deviation = (value - block_mean) * weight
        block_square = tl.sum(deviation * deviation, 0)
        total = tl.maximum(count + n, 1)
        delta = block_mean - mean
        square += block_square + delta * delta * (count * n / total)
        mean += delta * (n / total)
        count += n
    target = partial + ((client * channels + channel) * tl.num_programs(1) + part) * 3
    tl.store(target, count)
    tl.store(target + 1, mean)
    tl.store(target + 2, square)


@triton.jit
def _join_statistics_kernel(
    partial, mean, var, count, channels, PARTS: tl.constexpr, SUM: tl.constexpr, BC: tl.constexpr
):
    client = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    valid = c < channels
    channel = client * channels + c
    total = tl.zeros((BC,), SUM)
    joined_mean = tl.zeros((BC,), SUM)
    square = tl.zeros((BC,), SUM)
    for part in range(PARTS):
        source = partial + (channel * PARTS + part) * 3
        n = tl.load(source, mask=valid, other=0.0)
        delta = tl.load(source + 1, mask=valid, other=0.0) - joined_mean
        joined_count = tl.maximum(total + n, 1)
        square += tl.load(source + 2, mask=valid, other=0.0) + delta * delta * (total * n / joined_count)
        joined_mean += delta * (n / joined_count)
        total += n
    tl.store(mean + channel, joined_mean, mask=valid)
    tl.store(var + channel, square / tl.maximum(total, 1), mask=valid)
    tl.store(count + client + c, total, mask=c == 0)  # every channel has as many values


@triton.jit
def _apply_kernel(
    x,
    y,
    mean,
    scale,
    weight,
    bias,
    batch,
    channels,
    size,
    HW: tl.constexpr,
    AFFINE: tl.constexpr,
    SUM: tl.constexpr,
    BQ: tl.constexpr,
):
    client = tl.program_id(1).to(tl.int64)
    q = tl.program_id(0) * BQ + tl.arange(0, BQ)
    valid = q < size
    channel = client * channels + (q // HW) % channels
    value = tl.load(x + client * size + q, mask=valid, other=0.0).to(SUM)
    value = (value - tl.load(mean + channel, mask=valid, other=0.0)) * tl.load(scale + channel, mask=valid, other=0.0)
    if AFFINE:
        value = value * tl.load(weight + channel, mask=valid, other=0.0).to(SUM) + tl.load(
            bias + channel, mask=valid, other=0.0
        ).to(SUM)
    tl.store(y + client * size + q, value.to(y.dtype.element_ty), mask=valid)


@triton.jit
def normalise_value(x, mean, scale, weight, bias, AFFINE: tl.constexpr, SUM: tl.constexpr):
    """A value as the layer returns it: rounded to its own type, in which activation and pooling compare."""
    value = (x.to(SUM) - mean) * scale
    if AFFINE:
        value = value * weight + bias
    return value.to(x.dtype).to(SUM)


@triton.jit
def _gradient_sums_kernel(
    x, dy, mean, scale, weight, bias, partial, batch, channels, length,
    HW: tl.constexpr, BEHIND_RELU: tl.constexpr, AFFINE: tl.constexpr, RELU6: tl.constexpr, SUM: tl.constexpr, BQ: tl.constexpr,
):  # fmt: skip
    channel, part, client = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    x += client * batch * channels * HW
    dy += client * batch * channels * HW
    start = part * length
    end = tl.minimum(start + length, batch * HW)
    channel_mean = tl.load(mean + client * channels + channel)
    channel_scale = tl.load(scale + client * channels + channel)
    channel_weight = channel_scale
    channel_bias = channel_mean
    if AFFINE:
        channel_weight = tl.load(weight + client * channels + channel).to(SUM)
        channel_bias = tl.load(bias + client * channels + channel).to(SUM)
    sum_dy = tl.zeros((BQ,), SUM)
    sum_dy_z = tl.zeros((BQ,), SUM)
    for offset in range(start, end, BQ):
        q = offset + tl.arange(0, BQ)
        valid = q < end
        index = ((q // HW) * channels + channel) * HW + q % HW
        grad = tl.load(dy + index, mask=valid, other=0.0).to(SUM)
        value = tl.load(x + index, mask=valid, other=0.0)
        if BEHIND_RELU:
            grad = tl.where(
                relu_is_flat(
                    normalise_value(value, channel_mean, channel_scale, channel_weight, channel_bias, AFFINE, SUM),
                    RELU6,
                ),
                0.0,
                grad,
            )
        sum_dy += grad
        sum_dy_z += grad * ((value.to(SUM) - channel_mean) * channel_scale)
    index = partial + ((client * channels + channel) * tl.num_programs(1) + part) * 2
    tl.store(index, tl.sum(sum_dy, 0))
    tl.store(index + 1, tl.sum(sum_dy_z, 0))


@triton.jit
def _backward_kernel(
    x, dy, dx, mask, mean, scale, weight, sums, count, batch, channels, size,
    HW: tl.constexpr, AFFINE: tl.constexpr, MASKED: tl.constexpr, SUM: tl.constexpr, BQ: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(1).to(tl.int64)
    q = tl.program_id(0) * BQ + tl.arange(0, BQ)
    valid = q < size
    channel = client * channels + (q // HW) % channels
    grad = tl.load(dy + client * size + q, mask=valid, other=0.0).to(SUM)
    value = tl.load(x + client * size + q, mask=valid, other=0.0).to(SUM)
    channel_scale = tl.load(scale + channel, mask=valid, other=0.0)
    z = (value - tl.load(mean + channel, mask=valid, other=0.0)) * channel_scale
    row_share = 1.0 / tl.load(count + client)
    if MASKED:
        row_share = row_share * tl.load(mask + client * batch + q // (HW * channels), mask=valid, other=0.0).to(SUM)
    sum_dy = tl.load(sums + channel * 2, mask=valid, other=0.0)
    sum_dy_z = tl.load(sums + channel * 2 + 1, mask=valid, other=0.0)
    if AFFINE:
        channel_scale = channel_scale * tl.load(weight + channel, mask=valid, other=0.0).to(SUM)
    tl.store(
        dx + client * size + q,
        (channel_scale * (grad - row_share * (sum_dy + z * sum_dy_z))).to(dx.dtype.element_ty),
        mask=valid,
    )
