"""Convolution of small patches, ReLU and max pooling of a cohort in one kernel, for the first layers of a network.

With ``k = (c, r, s)`` over channels and positions of a filter, of windows q of two columns that do not overlap,

    y_q = relu(max_{p in q} z_p)      z_p = sum_k w[k] x[k at p] + b      dw[k] = sum_p dz_p x[k at p]

The kernels read the patches from the images: neither the matrix of patches nor z is in memory, unless a summary is requested
(:mod:`fedloom.gpu.tap_summary`). Then the forward kernel also computes the summary of relu(z), and on request that of y,
and saves z with both columns of a window row next to each other. Products are TF32 (torch's default for convolutions of
float32) or those of 16-bit inputs. The input gets no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedloom.gpu.cohort import (
    apply_to_cohort,
    client_count,
    contiguous_per_client,
    is_cohort,
    is_cohort_with_shared_filters,
    relu,
    relu_is_flat,
    tensor_or,
)
from fedloom.gpu.conv_shapes import ConvParameters, ConvShape, Pair, output_size
from fedloom.gpu.patch_convolution import load_patches
from fedloom.gpu.relu_pool import update_maximum
from fedloom.gpu.tap_summary import summary_gradient
from fedloom.ops import in_autocast_type

MAX_PATCH, MAX_FILTERS = 127, 64
"""Longest patch and most filters."""
MAX_PIXELS = 1 << 22
"""Most pixels of z: CUDA's grid has less than 2^16 programs along the axis of an image's tiles."""
BLOCK_PATCH = 16
"""Patch values of a product: the minimum in Triton, as fast as 32 on an H200."""
WINDOWS = 64
"""Windows of a program, half as many with summaries; measured on an H200 with up to 32 filters, like the next two."""
BACKWARD_WINDOWS = 16
"""Windows of a product in the backward kernel; more do not fit into registers."""
PROGRAMS = 4
"""Programs of the backward kernel per multiprocessor, which run at the same time."""
PADDING = tl.constexpr(-1e30)
"""Value of absent filters in a softmax: below all outputs of a ReLU, finite after subtraction of the largest."""


def conv_relu_pool(
    x: Tensor, w: Tensor, bias: Tensor | None, parameters: ConvParameters, window: Pair, *, relu6: bool = False
) -> Tensor | None:
    """Apply the three layers to one client's images inside ``vmap``.

    Plain form: :class:`fedloom.network.layers.CohortConv2d`, ``nn.ReLU``, ``nn.MaxPool2d``.

    Args:
        x: (batch, channels, height, width), without a gradient.
        w: (outputs, channels, kernel height, kernel width). Clients may share filters and bias.
        bias: (outputs,) or None.
        parameters: stride, padding and dilation.
        window: height and width of the windows; the width is 2.
        relu6: whether the ReLU is ReLU6.
    """
    arguments, save = _cast_arguments(x, w, bias, parameters, window, whole=False), torch.is_grad_enabled()
    if arguments is None:
        return None
    y: Tensor = apply_to_cohort(_CohortConvReluPool, *arguments, parameters, window, relu6, save, 0)
    return y


def conv_relu_pool_summary(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    parameters: ConvParameters,
    window: Pair,
    *,
    relu6: bool = False,
    pooled: bool = False,
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]] | None:
    """Apply the three layers and summarise the output of the ReLU, with ``pooled`` also that of the pooling.

    The windows must fill the map. Plain form: :func:`conv_relu_pool`, :func:`fedloom.ops.features.channel_summary`.
    """
    arguments, save = _cast_arguments(x, w, bias, parameters, window, whole=True), torch.is_grad_enabled()
    if arguments is None:
        return None
    y, *sums = apply_to_cohort(_CohortConvReluPool, *arguments, parameters, window, relu6, save, 1 + pooled)
    return y, list(zip(sums[::2], sums[1::2], strict=True))


def _cast_arguments(
    x: Tensor, w: Tensor, bias: Tensor | None, parameters: ConvParameters, window: Pair, *, whole: bool
) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Return images, filters and bias in the dtype of autocast; None, without a cast, if the kernel does not support them."""
    if w.shape[1:].numel() > MAX_PATCH or len(w) > MAX_FILTERS or not is_cohort(x) or client_count(x) == 1:
        return None
    out = output_size(x.shape[2:], w.shape[2:], parameters)
    fits = x.shape[1] == w.shape[1] and window[1] == 2 and window[0] <= out[0] and out[1] >= 2
    fits = fits and out[0] * out[1] < MAX_PIXELS
    filled = not whole or not (out[0] % window[0] or out[1] % 2)
    if not fits or not filled or (torch.is_grad_enabled() and torch._C._functorch.get_unwrapped(x).requires_grad):
        return None
    x, w, bias = in_autocast_type(x, w, bias)
    # Float32 only where torch may use TF32 in convolutions, which is its default.
    typed = x.dtype in (torch.float16, torch.bfloat16) or (x.dtype is torch.float32 and torch.backends.cudnn.allow_tf32)
    return (x, w, bias) if typed and is_cohort_with_shared_filters(x, w, bias) else None


class _CohortConvReluPool(torch.autograd.Function):
    """x: (clients, batch, channels, height, width); w: (clients, outputs, channels, kernel height, kernel width); bias: (clients, outputs)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        bias: Tensor | None,
        parameters: ConvParameters,
        window: Pair,
        relu6: bool,
        save: bool,
        summaries: int,
    ) -> Tensor | tuple[Tensor, ...]:
        shape = ConvShape.of(x, w, parameters)
        x = round_to_tf32(x.contiguous())
        w, bias = contiguous_per_client(w), None if bias is None else contiguous_per_client(bias)
        y, argmax, tensors, sums = _forward(x, w, bias, shape, window, relu6=relu6, save=save, summaries=summaries)
        ctx.shape, ctx.window, ctx.relu6, ctx.biased = shape, window, relu6, bias is not None
        if save:
            # A copy of y, at most a quarter of z: the next layer may work in place.
            ctx.save_for_backward(x, argmax, y.clone() if summaries > 1 else None, *tensors)
        return (y, *sums) if summaries else y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, argmax, y, *tensors = ctx.saved_tensors
        dy, *d_sums = (d.contiguous() for d in gradients)
        dw, db = _filter_gradients(x, dy, argmax, ctx.shape, ctx.window, y, tensors, d_sums, relu6=ctx.relu6)
        return None, dw, db if ctx.biased else None, *[None] * 5


def round_to_tf32(x: Tensor) -> Tensor:
    """Round a contiguous float32 tensor to the nearest TF32; return other dtypes unchanged."""
    if x.dtype != torch.float32:
        return x
    y = torch.empty_like(x)
    _round_kernel[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), B=1024)
    return y


def _forward(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    shape: ConvShape,
    window: Pair,
    *,
    relu6: bool,
    save: bool,
    summaries: int,
) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Run the forward kernel.

    Args:
        x: (clients, batch, channels, height, width), contiguous, rounded.
        w: (clients, outputs, channels, kernel height, kernel width), contiguous per client; stride 0 if shared.
        bias: (clients, outputs), likewise, or None.
        shape: of the convolution.
        window: height and width of the windows.
        relu6: whether the ReLU is ReLU6.
        save: whether to return the indices of the maxima.
        summaries: number of summaries: 0, 1 (of the ReLU) or 2 (of ReLU and pooling).

    Returns:
        The pooled map; the index of each window's maximum (255: no gradient) or None; with summaries z, negative
        entropies and ``log_sum`` of the positions; means and negative entropies per summary.
    """
    clients, batch = x.shape[:2]
    outputs, rows, columns = w.shape[1], shape.out[0] // window[0], shape.out[1] // window[1]
    images, area, window_size = clients * batch, rows * columns, window[0] * window[1]
    y = x.new_empty(clients, batch, outputs, rows, columns)
    argmax = torch.empty_like(y, dtype=torch.uint8) if save else None
    block_outputs = max(16, triton.next_power_of_2(outputs))
    block_windows = WINDOWS * 32 // max(32, block_outputs) // (2 if summaries and block_outputs <= 32 else 1)
    block_windows = max(16, min(block_windows, triton.next_power_of_2(area)))
    parts = triton.cdiv(area, block_windows)
    large = block_outputs > 32 and shape.patch_size > 64  # more than the registers of two warps hold
    tensors: tuple[Tensor, ...] = ()
    partial: tuple[Tensor, ...] = ()
    if summaries:
        assert shape.out == (rows * window[0], columns * window[1])
        positions = x.new_empty(2, images, window_size + summaries - 1, area, dtype=torch.float32)
        tensors = x.new_empty(images, outputs, window_size, area), positions[0], positions[1]
        sizes = (summaries, clients, batch, parts, outputs), (summaries, clients, batch, parts)
        partial = positions.new_empty(sizes[0]), positions.new_empty(sizes[1])
    _forward_kernel[(images, parts)](
        x, w, tensor_or(bias, x), y, tensor_or(argmax, x), *(*tensors, *partial) or [x] * 5, batch, w.stride(0),
        0 if bias is None else bias.stride(0), **shape.constants, N=outputs, WINDOW_ROWS=window[0],
        BIAS=bias is not None, RELU6=relu6, SAVE=save, SUMMARIES=summaries, BO=block_outputs, BK=BLOCK_PATCH,
        BQ=block_windows, **_launch_options(block_outputs, 4 if summaries or large else 2, (2, 168) if summaries else None),
    )  # fmt: skip
    if not summaries:
        return y, argmax, (), ()
    mean, entropy = (t.squeeze(3) if parts == 1 else t.sum(3) for t in partial)
    return y, argmax, tensors, tuple(t[i] for i in range(summaries) for t in (mean, entropy))


def _filter_gradients(
    x: Tensor,
    dy: Tensor,
    argmax: Tensor,
    shape: ConvShape,
    window: Pair,
    y: Tensor | None,
    tensors: Sequence[Tensor],
    d_sums: Sequence[Tensor],
    *,
    relu6: bool,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of filters and biases.

    Args:
        x: as in :func:`_forward`.
        dy: gradient of the pooled map, contiguous.
        argmax: from :func:`_forward`.
        shape: of the convolution.
        window: height and width of the windows.
        y: the pooled map, if it was summarised.
        tensors: z, negative entropies and ``log_sum``, if there are summaries.
        d_sums: gradients of the summaries, contiguous.
        relu6: whether the ReLU is ReLU6.
    """
    clients, batch, outputs = dy.shape[:3]
    block_outputs = max(16, triton.next_power_of_2(outputs))
    block_patch = max(16, triton.next_power_of_2(shape.patch_size + 1))
    blocks = triton.cdiv(dy.shape[3] * dy.shape[4], BACKWARD_WINDOWS)
    length = triton.cdiv(batch * blocks, max(1, PROGRAMS * _multiprocessors(x.device) // clients))
    partial = x.new_empty(clients, triton.cdiv(batch * blocks, length), outputs, block_patch, dtype=torch.float32)
    _backward_kernel[(partial.shape[1], clients)](
        x, dy, argmax, tensor_or(y, x), *tensors or [x] * 3, *d_sums, *[x] * (4 - len(d_sums)), partial, batch, length,
        blocks, **shape.constants, N=outputs, WINDOW_ROWS=window[0], RELU6=relu6, SUMMARIES=len(d_sums) // 2,
        BO=block_outputs, BK=block_patch, BQ=BACKWARD_WINDOWS,
        **_launch_options(block_outputs, 8 if d_sums else 4, (4, 128)), num_stages=1,  # pipelines copy 4 bytes at a time
    )  # fmt: skip
    gradient = partial.sum(1).to(dy.dtype)
    dw = gradient[..., : shape.patch_size].reshape(clients, outputs, shape.channels, *shape.kernel)
    return dw, gradient[..., shape.patch_size]


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def _launch_options(block_outputs: int, warps: int, measured: tuple[int, int] | None) -> dict[str, int]:
    """Return warps and registers of a program: for up to 32 filters those measured, with which more programs run at a time."""
    if measured is None or block_outputs > 32:
        return {"num_warps": warps}
    return {"num_warps": measured[0], "maxnreg": measured[1]}


@triton.jit
def _to_tf32(x):
    """Round float32 to the nearest TF32; a product truncates, which makes every value smaller. Keep other dtypes."""
    if x.dtype == tl.float32:
        bits = (x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
        return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    else:
        return x


@triton.jit
def _round_kernel(x, y, size, B: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    tl.store(y + index, _to_tf32(tl.load(x + index, mask=index < size, other=0.0)), mask=index < size)


@triton.jit
def _position_summary(act, N: tl.constexpr):
    """Return negative entropy and ``log sum_c exp`` of each position of a block (channels, positions)."""
    if act.shape[0] > N:
        act = tl.where((tl.arange(0, act.shape[0]) < N)[:, None], act, PADDING)
    maximum = tl.max(act, 0)
    difference = act - maximum[None, :]
    weight = tl.exp2(difference * 1.4426950408889634)
    total = tl.sum(weight, 0)
    log = tl.log(total)
    return tl.sum(difference * weight, 0) / total - log, maximum + log


@triton.jit
def _forward_kernel(
    x, w, bias, y, argmax, z, entropies, log_sums, means, mean_entropies, batch, w_stride, bias_stride,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, R: tl.constexpr,
    S: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, DH: tl.constexpr,
    DW: tl.constexpr, N: tl.constexpr, WINDOW_ROWS: tl.constexpr, BIAS: tl.constexpr, RELU6: tl.constexpr,
    SAVE: tl.constexpr, SUMMARIES: tl.constexpr, BO: tl.constexpr, BK: tl.constexpr, BQ: tl.constexpr,
):  # fmt: skip
    COLUMNS: tl.constexpr = OW // 2
    AREA: tl.constexpr = (OH // WINDOW_ROWS) * COLUMNS
    K: tl.constexpr = C * R * S
    image = tl.program_id(0).to(tl.int64)
    client = image // batch
    o = tl.arange(0, BO)
    p = tl.program_id(1) * (2 * BQ) + tl.arange(0, 2 * BQ)  # pixels of a window row, two per window
    valid_pixel = p < 2 * AREA
    valid_z = (o < N)[:, None] & valid_pixel[None, :]
    x += image * (C * H * W)
    w += client * w_stride
    z += image * (N * WINDOW_ROWS * 2 * AREA)
    entropies += image * ((2 * WINDOW_ROWS + SUMMARIES - 1) * AREA)
    log_sums += image * ((2 * WINDOW_ROWS + SUMMARIES - 1) * AREA)
    bias_value = 0.0
    if BIAS:
        bias_value = tl.load(bias + client * bias_stride + o, mask=o < N, other=0.0).to(tl.float32)[:, None]
    maximum = tl.zeros((BO, BQ), tl.float32)
    z_at_maximum = tl.zeros((BO, BQ), tl.float32)
    window_argmax = tl.zeros((BO, BQ), tl.uint8)
    act_sum = tl.zeros((BO, 2 * BQ), tl.float32)
    entropy_sum = tl.zeros((2 * BQ,), tl.float32)
    for window_row in tl.static_range(WINDOW_ROWS):
        top = ((p // (2 * COLUMNS)) * WINDOW_ROWS + window_row) * SH - PH
        left_column = (p % (2 * COLUMNS)) * SW - PW
        total = tl.zeros((BO, 2 * BQ), tl.float32)
        for start in tl.static_range(0, K, BK):
            k = start + tl.arange(0, BK)
            patch = load_patches(
                x, top * W + left_column, top, left_column, k, valid_pixel[None, :], C, H, W, R, S, PH, PW, DH, DW
            )
            valid_filter = (o < N)[:, None] & (k < K)[None, :]
            filters = tl.load(w + ((o * K)[:, None] + k[None, :]), mask=valid_filter, other=0.0)
            total = tl.dot(_to_tf32(filters), patch, total, input_precision="tf32")
        total += bias_value
        if SUMMARIES > 0:
            z_value = total.to(z.dtype.element_ty)
            tl.store(
                z + ((o * (WINDOW_ROWS * 2 * AREA))[:, None] + (window_row * (2 * AREA) + p)[None, :]),
                z_value,
                mask=valid_z,
            )
            act = relu(z_value.to(tl.float32), RELU6)
            entropy, log_sum = _position_summary(act, N)
            tl.store(entropies + (window_row * (2 * AREA) + p), entropy, mask=valid_pixel)
            tl.store(log_sums + (window_row * (2 * AREA) + p), log_sum, mask=valid_pixel)
            act_sum += act
            entropy_sum += tl.where(valid_pixel, entropy, 0.0)
        left, right = tl.split(tl.reshape(total, (BO, BQ, 2)))
        maximum, z_at_maximum, window_argmax = update_maximum(
            left, maximum, z_at_maximum, window_argmax, 0.0, 1.0, 1.0, 0.0, window_row * 2, False, False, tl.float32
        )
        maximum, z_at_maximum, window_argmax = update_maximum(
            right,
            maximum,
            z_at_maximum,
            window_argmax,
            0.0,
            1.0,
            1.0,
            0.0,
            window_row * 2 + 1,
            False,
            False,
            tl.float32,
        )
    q = tl.program_id(1) * BQ + tl.arange(0, BQ)
    valid_window = q < AREA
    valid_y = (o < N)[:, None] & valid_window[None, :]
    index = q[None, :] + o[:, None] * AREA
    y_value = relu(maximum, RELU6).to(y.dtype.element_ty)
    tl.store(y + image * (N * AREA) + index, y_value, mask=valid_y)
    if SAVE:
        tl.store(
            argmax + image * (N * AREA) + index,
            tl.where(relu_is_flat(maximum, RELU6), 255, window_argmax).to(tl.uint8),
            mask=valid_y,
        )
    part = image * tl.num_programs(1) + tl.program_id(1)
    if SUMMARIES > 0:
        mean = tl.sum(tl.where(valid_pixel[None, :], act_sum, 0.0), 1) / (OH * OW)
        tl.store(means + part * N + o, mean, mask=o < N)
        tl.store(mean_entropies + part, tl.sum(entropy_sum, 0) / (OH * OW))
    if SUMMARIES > 1:
        act = y_value.to(tl.float32)
        entropy, log_sum = _position_summary(act, N)
        tl.store(entropies + (WINDOW_ROWS * 2 * AREA + q), entropy, mask=valid_window)
        tl.store(log_sums + (WINDOW_ROWS * 2 * AREA + q), log_sum, mask=valid_window)
        part += tl.num_programs(0).to(tl.int64) * tl.num_programs(1)
        mean = tl.sum(tl.where(valid_window[None, :], act, 0.0), 1) / AREA
        tl.store(means + part * N + o, mean, mask=o < N)
        tl.store(mean_entropies + part, tl.sum(tl.where(valid_window, entropy, 0.0), 0) / AREA)


@triton.jit(do_not_specialize=["blocks"])
def _backward_kernel(
    x, dy, argmax, y, z, entropies, log_sums, d_mean, d_entropy, d_mean_y, d_entropy_y, partial, batch, length, blocks,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, R: tl.constexpr,
    S: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, DH: tl.constexpr,
    DW: tl.constexpr, N: tl.constexpr, WINDOW_ROWS: tl.constexpr, RELU6: tl.constexpr, SUMMARIES: tl.constexpr,
    BO: tl.constexpr, BK: tl.constexpr, BQ: tl.constexpr,
):  # fmt: skip
    COLUMNS: tl.constexpr = OW // 2
    AREA: tl.constexpr = (OH // WINDOW_ROWS) * COLUMNS
    K: tl.constexpr = C * R * S
    POSITIONS: tl.constexpr = (2 * WINDOW_ROWS + SUMMARIES - 1) * AREA
    client = tl.program_id(1).to(tl.int64)
    o = tl.arange(0, BO)
    k = tl.arange(0, BK)
    total = tl.zeros((BK, BO), tl.float32)
    first_block = tl.program_id(0) * length
    for block in range(first_block, tl.minimum(first_block + length, batch * blocks)):
        image = client * batch + block // blocks
        # If the compiler knew the number of blocks, it would compute indices in pairs of 16 bits, which ptxas 12.8 gets wrong.
        start = (block % blocks) * BQ
        tl.assume(start >= 0)
        p = 2 * start + tl.arange(0, 2 * BQ)
        valid_pixel = p < 2 * AREA
        valid_z = (o < N)[:, None] & valid_pixel[None, :]
        q = start + tl.arange(0, BQ)
        valid_window = q < AREA
        valid_y = (o < N)[:, None] & valid_window[None, :]
        index = o[:, None] * AREA + q[None, :]
        grad_y = tl.load(dy + image * (N * AREA) + index, mask=valid_y, other=0.0).to(tl.float32)
        maximum_index = tl.load(argmax + image * (N * AREA) + index, mask=valid_y, other=255)
        if SUMMARIES > 0:
            grad_mean = (tl.load(d_mean + image * N + o, mask=o < N, other=0.0) / (OH * OW))[:, None]
            grad_entropy = tl.load(d_entropy + image) / (OH * OW)
        if SUMMARIES > 1:
            grad_mean_y = (tl.load(d_mean_y + image * N + o, mask=o < N, other=0.0) / AREA)[:, None]
            grad_entropy_y = tl.load(d_entropy_y + image) / AREA
            act = tl.load(y + image * (N * AREA) + index, mask=valid_y, other=0.0).to(tl.float32)
            log_sum = tl.load(
                log_sums + image * POSITIONS + (WINDOW_ROWS * 2 * AREA + q), mask=valid_window, other=0.0
            )[None, :]
            entropy = tl.load(
                entropies + image * POSITIONS + (WINDOW_ROWS * 2 * AREA + q), mask=valid_window, other=0.0
            )[None, :]
            grad_y += summary_gradient(act, log_sum, entropy, grad_entropy_y, grad_mean_y)
        for window_row in tl.static_range(WINDOW_ROWS):
            top = ((p // (2 * COLUMNS)) * WINDOW_ROWS + window_row) * SH - PH
            left_column = (p % (2 * COLUMNS)) * SW - PW
            left = tl.where(maximum_index == 2 * window_row, grad_y, 0.0)
            right = tl.where(maximum_index == 2 * window_row + 1, grad_y, 0.0)
            grad_z = tl.reshape(tl.join(left, right), (BO, 2 * BQ))
            if SUMMARIES > 0:
                z_index = (o * (WINDOW_ROWS * 2 * AREA))[:, None] + (window_row * (2 * AREA) + p)[None, :]
                z_value = tl.load(z + image * (N * WINDOW_ROWS * 2 * AREA) + z_index, mask=valid_z, other=0.0).to(
                    tl.float32
                )
                z_index = window_row * (2 * AREA) + p
                log_sum = tl.load(log_sums + image * POSITIONS + z_index, mask=valid_pixel, other=0.0)[None, :]
                entropy = tl.load(entropies + image * POSITIONS + z_index, mask=valid_pixel, other=0.0)[None, :]
                grad_z += summary_gradient(relu(z_value, RELU6), log_sum, entropy, grad_entropy, grad_mean)
                grad_z = tl.where(relu_is_flat(z_value, RELU6), 0.0, grad_z)
            grad_z = tl.trans(_to_tf32(grad_z.to(x.dtype.element_ty)))
            image_start = x + image * (C * H * W)
            patch = load_patches(
                image_start,
                top * W + left_column,
                top,
                left_column,
                k,
                valid_pixel[None, :],
                C,
                H,
                W,
                R,
                S,
                PH,
                PW,
                DH,
                DW,
            )
            patch = tl.where((k == K)[:, None], 1.0, patch).to(x.dtype.element_ty)  # for the bias
            total = tl.dot(patch, grad_z, total, input_precision="tf32")
    partial += ((client * tl.num_programs(0) + tl.program_id(0)) * N) * BK
    tl.store(partial + ((o * BK)[None, :] + k[:, None]), total, mask=(o < N)[None, :] & (k <= K)[:, None])
