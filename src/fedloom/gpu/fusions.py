"""Chains of layers of a whole cohort as one function: [batch normalisation,] ReLU [and pooling], on CUDA under ``vmap``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedloom.gpu.cohort import _Lifted, clients, laid, serves, serves_filters, slopes
from fedloom.gpu.geometry import Geometry, Pair, Steps, sides
from fedloom.ops import in_autocast_type

SHORT, FILTERS = 127, 64
"""Longest patch, and most filters, of a convolution that goes through one kernel with what is behind it."""
LARGEST = 1 << 22
"""Most positions of its map: a picture's programs stand along an axis of CUDA's grid that has less than 2^16 of them."""


def acted(x: Tensor, window: Pair, *, six: bool = False) -> Tensor:
    """ReLU (of at most 6), then the maximum over windows that do not overlap, of one client inside ``vmap``.

    Args:
        x: (batch, channels, height, width).
        window: height and width of the windows.
        six: whether the activation ends at 6.
    """
    y: Tensor = _Lifted.apply(_CohortActivation, x, window, six, torch.is_grad_enabled())  # type: ignore[no-untyped-call]
    return y


def opened(
    x: Tensor, w: Tensor, bias: Tensor | None, steps: Steps, window: Pair, *, six: bool = False
) -> Tensor | None:
    """A convolution of what has no gradient, ReLU and pooling as in :func:`acted`, of one client inside ``vmap``; None where no kernel serves.

    Args:
        x: (batch, channels, height, width).
        w: the filters, which clients may share, as they may the bias.
        bias: of each filter, or None.
        steps: of the convolution.
        window: height and width of the windows.
        six: whether the activation ends at 6.
    """
    given, keep = _opens(x, w, bias, steps, window, whole=False), torch.is_grad_enabled()
    if given is None:
        return None
    y: Tensor = _Lifted.apply(  # type: ignore[no-untyped-call]
        _CohortOpening, *given, steps, window, six, keep, 0
    )
    return y


def opened_summed(
    x: Tensor, w: Tensor, bias: Tensor | None, steps: Steps, window: Pair, *, six: bool = False, pooled: bool = False
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]] | None:
    """As :func:`opened`, and of what the ReLU returns, and where ``pooled`` the pooling, what :func:`fedloom.taps.losses.channel_summary` makes of it.

    The windows fill the map.
    """
    given, keep = _opens(x, w, bias, steps, window, whole=True), torch.is_grad_enabled()
    if given is None:
        return None
    y, *made = _Lifted.apply(_CohortOpening, *given, steps, window, six, keep, 1 + pooled)  # type: ignore[no-untyped-call]
    return y, list(zip(made[::2], made[1::2], strict=True))


def _opens(
    x: Tensor, w: Tensor, bias: Tensor | None, steps: Steps, window: Pair, *, whole: bool
) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Pictures, filters and bias in the type of autocast, into which they are only turned where shapes fit; None where no kernel serves."""
    if w.shape[1:].numel() > SHORT or len(w) > FILTERS or not serves(x) or clients(x) == 1:
        return None
    out = sides(x.shape[2:], w.shape[2:], steps)
    fits = x.shape[1] == w.shape[1] and window[1] == 2 and window[0] <= out[0] and out[1] >= 2
    fits = fits and out[0] * out[1] < LARGEST
    filled = not whole or not (out[0] % window[0] or out[1] % 2)
    if not fits or not filled or (torch.is_grad_enabled() and torch._C._functorch.get_unwrapped(x).requires_grad):
        return None
    x, w, bias = in_autocast_type(x, w, bias)
    # Products of float32 are TF32's where torch lets convolutions use it, as it does unless it is told not to.
    typed = x.dtype in (torch.float16, torch.bfloat16) or (x.dtype is torch.float32 and torch.backends.cudnn.allow_tf32)
    return (x, w, bias) if typed and serves_filters(x, w, bias) else None


def chained(
    x: Tensor,
    mask: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    window: Pair = (1, 1),
    *,
    six: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Batch normalisation, ReLU and pooling of one client inside ``vmap``.

    Args:
        x: (batch, channels, height, width).
        mask: 1 for real rows, 0 for padding; None when every row is real.
        weight: of the normalisation.
        bias: of the normalisation.
        eps: added to the variance.
        window: of the pooling; (1, 1) for none.
        six: whether the activation ends at 6.

    Returns:
        Output; mean, variance and number of values per channel before normalisation.
    """
    keep = torch.is_grad_enabled()
    y, mean, var, count = _Lifted.apply(_CohortChain, x, mask, weight, bias, eps, window, six, keep)  # type: ignore[no-untyped-call]
    return y, mean, var, count


def _measured(
    x: Tensor, mask: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor, Tensor, Tensor, Tensor]:
    """The arguments of a normalisation without gaps; mean, variance, number of values and scale of each channel."""
    from fedloom.gpu import norms

    x = x.contiguous()
    mask, weight, bias = (None if t is None else t.contiguous() for t in (mask, weight, bias))
    mean, var, count = norms.moments(x.flatten(3), mask)
    return x, mask, weight, bias, mean, var, count, torch.rsqrt(var + eps)


class _CohortActivation(torch.autograd.Function):
    """x: (clients, batch, channels, height, width)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, window: Pair, six: bool, keep: bool) -> Tensor:
        from fedloom.gpu import patches

        y, place, _ = patches.chained(x.contiguous(), window, None, six=six, keep=keep)
        ctx.save_for_backward(place)
        ctx.window, ctx.size = window, x.shape
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        from fedloom.gpu import patches

        (place,) = ctx.saved_tensors
        clients, batch, channels, height, width = ctx.size
        size = torch.Size((clients, batch * channels, height, width))
        dx = patches.returned(dy.contiguous().flatten(1, 2), place.flatten(1, 2), size, ctx.window)
        return dx.view(ctx.size), None, None, None


class _CohortOpening(torch.autograd.Function):
    """x: (clients, batch, channels, height, width); w: (clients, outputs, channels, kernel height, kernel width); bias: (clients, outputs)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        bias: Tensor | None,
        steps: Steps,
        window: Pair,
        six: bool,
        keep: bool,
        taps: int,
    ) -> Tensor | tuple[Tensor, ...]:
        from fedloom.gpu import openings

        shape = Geometry.of(x, w, steps)
        x, w, bias = openings.rounded(x.contiguous()), laid(w), None if bias is None else laid(bias)
        y, place, kept, summaries = openings.opened(x, w, bias, shape, window, six=six, keep=keep, taps=taps)
        ctx.shape, ctx.window, ctx.six, ctx.biased = shape, window, six, bias is not None
        if keep:
            # A copy, which is a quarter of the map or less: a layer behind may work in place.
            ctx.save_for_backward(x, place, y.clone() if taps > 1 else None, *kept)
        return (y, *summaries) if taps else y

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *given: Tensor) -> tuple[Tensor | None, ...]:
        from fedloom.gpu import openings

        x, place, y, *kept = ctx.saved_tensors
        dy, *slopes = (d.contiguous() for d in (dy, *given))
        dw, db = openings.opened_back(x, dy, place, ctx.shape, ctx.window, y, kept, slopes, six=ctx.six)
        return None, dw, db if ctx.biased else None, *[None] * 5


class _CohortChain(torch.autograd.Function):
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
        six: bool,
        keep: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        from fedloom.gpu import patches

        x, mask, weight, bias, mean, var, count, scale = _measured(x, mask, weight, bias, eps)
        y, place, kept = patches.chained(x, window, (mean, scale, weight, bias), six=six, keep=keep)
        if keep:
            ctx.save_for_backward(x, place, kept, mask, weight, bias, mean, scale, count.clamp(min=1))
        ctx.window, ctx.six = window, six
        ctx.mark_non_differentiable(mean, var, count)
        return y, mean, var, count

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        from fedloom.gpu import norms

        x, place, kept, mask, weight, bias, mean, scale, count = ctx.saved_tensors
        dy = dy.contiguous()
        norm = mean, scale, weight, bias
        at = x if kept is None else kept
        sums = norms.sums(at.flatten(3), dy.flatten(3), *norm, gated=True, six=ctx.six)
        dx = norms.chain_back(x, dy, place, mask, norm, sums, count, ctx.window, six=ctx.six)
        return dx, None, *slopes(sums, weight), None, None, None, None
