"""Depthwise convolutions of a whole cohort, on CUDA under ``vmap``: torch's gradient of their filters is slow, and needs planes turned."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedloom.gpu.cohort import _Lifted, laid, serves_filters
from fedloom.gpu.geometry import Geometry, Pair, sides

LARGEST = 63
"""Most places of a filter."""
NUMBERS = 2**31 - 1
"""Most numbers of a client's map: the kernels' addresses within it have 32 bits."""


def filtered(x: Tensor, w: Tensor, bias: Tensor | None, stride: Pair, padding: Pair, dilation: Pair) -> Tensor | None:
    """The depthwise convolution of one client inside ``vmap``; None where no kernel serves.

    Args:
        x: (batch, channels, height, width).
        w: (channels, 1, kernel height, kernel width), which clients may share, as they may the bias.
        bias: of each channel, or None.
        stride: of the convolution.
        padding: of the convolution.
        dilation: of the convolution.
    """
    fits = x.dim() == 4 and x.numel() and x.is_floating_point() and x.shape[1] == len(w) and w[0].numel() <= LARGEST
    if not fits or not serves_filters(x, w, bias):
        return None
    out = sides(x.shape[2:], w.shape[2:], (stride, padding, dilation))
    if min(out) < 1 or max(x.numel(), x.shape[:2].numel() * out[0] * out[1]) > NUMBERS:
        return None  # torch says what is wrong, or has longer addresses
    y: Tensor = _Lifted.apply(_CohortFilters, x, w, bias, stride, padding, dilation)  # type: ignore[no-untyped-call]
    return y


class _CohortFilters(torch.autograd.Function):
    """x: (clients, batch, channels, height, width); w: (clients, channels, 1, kernel height, kernel width); bias: (clients, channels)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, stride: Pair, padding: Pair, dilation: Pair
    ) -> Tensor:
        from fedloom.gpu import planes

        shape = Geometry.of(x, w, (stride, padding, dilation))
        x, w, bias = x.contiguous(), laid(w), None if bias is None else laid(bias)
        ctx.shape, ctx.biased = shape, bias is not None
        ctx.save_for_backward(x, w)
        return planes.filtered(x, w, bias, shape)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        from fedloom.gpu import planes

        x, w = ctx.saved_tensors
        dy = dy.contiguous()
        dx = planes.filtered_back(dy, w, ctx.shape) if ctx.needs_input_grad[0] else None
        dw = db = None
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            dw, db = planes.filter_slopes(x, dy, ctx.shape, biased=ctx.biased)
        return dx, dw, db, None, None, None
