"""Chains of layers of a whole cohort as one function: [batch normalisation,] ReLU [and pooling], on CUDA under ``vmap``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fedloom.kernels.cohort import _Lifted, clients, serves, serves_filters, shortened, slopes
from fedloom.kernels.geometry import Geometry, Pair, Steps, sides
from fedloom.kernels.rows import _laid

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


def acted_last(x: Tensor, bias: Tensor, window: Pair, *, six: bool = False) -> Tensor:
    """As :func:`acted` of ``x + bias``, without a gradient, for maps whose channels lie last, as they do in what is returned.

    Args:
        x: (batch, channels, height, width), of one client inside ``vmap``.
        bias: of each channel, the same for all clients.
        window: height and width of the windows.
        six: whether the activation ends at 6.
    """
    y: Tensor = _Lifted.apply(_CohortMaps, x, bias, window, six)  # type: ignore[no-untyped-call]
    return y


def opened(
    x: Tensor, w: Tensor, bias: Tensor | None, steps: Steps, window: Pair, *, six: bool = False, last: bool = False
) -> Tensor | None:
    """A convolution of what has no gradient, ReLU and pooling as in :func:`acted`, of one client inside ``vmap``; None where no kernel serves.

    Args:
        x: (batch, channels, height, width).
        w: the filters, which clients may share, as they may the bias.
        bias: of each filter, or None.
        steps: of the convolution.
        window: height and width of the windows.
        six: whether the activation ends at 6.
        last: whether channels lie last in what is returned, where no gradient is asked for.
    """
    given, keep = _opens(x, w, bias, steps, window, whole=False), torch.is_grad_enabled()
    if given is None:
        return None
    y: Tensor = _Lifted.apply(  # type: ignore[no-untyped-call]
        _CohortOpening, *given, steps, window, six, last and not keep, keep, 0
    )
    return y


def opened_summed(
    x: Tensor, w: Tensor, bias: Tensor | None, steps: Steps, window: Pair, *, six: bool = False, pooled: bool = False
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]] | None:
    """As :func:`opened`, and of what the ReLU returns, and where ``pooled`` the pooling, what :func:`fedloom.kernels.summarised` makes of it.

    The windows fill the map.
    """
    given, keep = _opens(x, w, bias, steps, window, whole=True), torch.is_grad_enabled()
    if given is None:
        return None
    y, *made = _Lifted.apply(_CohortOpening, *given, steps, window, six, False, keep, 1 + pooled)  # type: ignore[no-untyped-call]
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
    x, w, bias = shortened(x, w, bias)
    # Products of float32 are TF32's where torch lets convolutions use it, as it does unless it is told not to.
    typed = x.dtype in (torch.float16, torch.bfloat16) or (x.dtype is torch.float32 and torch.backends.cudnn.allow_tf32)
    return (x, w, bias) if typed and serves_filters(x, w, bias) else None


def acted_apart(x: Tensor, window: Pair, *, six: bool = False) -> tuple[Tensor, Tensor]:
    """As :func:`acted`, and what the ReLU returns; the windows fill the map."""
    y, act = _Lifted.apply(_CohortTappedActivation, x, window, six, torch.is_grad_enabled(), False)  # type: ignore[no-untyped-call]
    return y, act


def acted_summed(x: Tensor, window: Pair, *, six: bool = False) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """As :func:`acted`, and of what the ReLU returns, which is never in memory, what :func:`fedloom.kernels.summarised` makes of it."""
    y, *summary = _Lifted.apply(_CohortTappedActivation, x, window, six, torch.is_grad_enabled(), True)  # type: ignore[no-untyped-call]
    return y, (summary[0], summary[1])


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


def chained_apart(
    x: Tensor,
    mask: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    window: Pair,
    *,
    six: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As :func:`chained`, and behind the output what the ReLU returns; the windows fill the map."""
    keep = torch.is_grad_enabled()
    y, act, mean, var, count = _Lifted.apply(  # type: ignore[no-untyped-call]
        _CohortTappedChain, x, mask, weight, bias, eps, window, six, keep, False
    )
    return y, act, mean, var, count


def chained_summed(
    x: Tensor,
    mask: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    window: Pair,
    *,
    six: bool = False,
) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor, Tensor, Tensor]:
    """As :func:`chained_apart`, with a summary in the place of what the ReLU returns."""
    keep = torch.is_grad_enabled()
    y, *summary, mean, var, count = _Lifted.apply(  # type: ignore[no-untyped-call]
        _CohortTappedChain, x, mask, weight, bias, eps, window, six, keep, True
    )
    return y, (summary[0], summary[1]), mean, var, count


def _measured(
    x: Tensor, mask: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor, Tensor, Tensor, Tensor]:
    """The arguments of a normalisation without gaps; mean, variance, number of values and scale of each channel."""
    from fedloom.kernels import norms

    x = x.contiguous()
    mask, weight, bias = (None if t is None else t.contiguous() for t in (mask, weight, bias))
    mean, var, count = norms.moments(x.flatten(3), mask)
    return x, mask, weight, bias, mean, var, count, torch.rsqrt(var + eps)


class _CohortActivation(torch.autograd.Function):
    """x: (clients, batch, channels, height, width)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, window: Pair, six: bool, keep: bool) -> Tensor:
        from fedloom.kernels import patches

        y, place, _ = patches.chained(x.contiguous(), window, None, six=six, keep=keep)
        ctx.save_for_backward(place)
        ctx.window, ctx.size = window, x.shape
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        from fedloom.kernels import patches

        (place,) = ctx.saved_tensors
        clients, batch, channels, height, width = ctx.size
        size = torch.Size((clients, batch * channels, height, width))
        dx = patches.returned(dy.contiguous().flatten(1, 2), place.flatten(1, 2), size, ctx.window)
        return dx.view(ctx.size), None, None, None


class _CohortMaps(torch.autograd.Function):
    """x: (clients, batch, channels, height, width), channels last in memory; bias: (clients, channels), one for all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, window: Pair, six: bool) -> Tensor:
        from fedloom.kernels import maps

        y = maps.windowed(x.permute(0, 1, 3, 4, 2).contiguous(), bias[0].contiguous(), window, six=six)
        return y.permute(0, 1, 4, 2, 3)


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
        last: bool,
        keep: bool,
        taps: int,
    ) -> Tensor | tuple[Tensor, ...]:
        from fedloom.kernels import openings

        shape = Geometry.of(x, w, steps)
        x, w, bias = openings.rounded(x.contiguous()), _laid(w), None if bias is None else _laid(bias)
        y, place, kept, summaries = openings.opened(x, w, bias, shape, window, six=six, last=last, keep=keep, taps=taps)
        ctx.shape, ctx.window, ctx.six, ctx.biased = shape, window, six, bias is not None
        if keep:
            ctx.save_for_backward(x, place, y if taps > 1 else None, *kept)
        return (y, *summaries) if taps else y

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *given: Tensor) -> tuple[Tensor | None, ...]:
        from fedloom.kernels import openings

        x, place, y, *kept = ctx.saved_tensors
        dy, *slopes = (d.contiguous() for d in (dy, *given))
        dw, db = openings.opened_back(x, dy, place, ctx.shape, ctx.window, y, kept, slopes, six=ctx.six)
        return None, dw, db if ctx.biased else None, *[None] * 6


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
        from fedloom.kernels import patches

        x, mask, weight, bias, mean, var, count, scale = _measured(x, mask, weight, bias, eps)
        y, place, kept = patches.chained(x, window, (mean, scale, weight, bias), six=six, keep=keep)
        if keep:
            ctx.save_for_backward(x, place, kept, mask, weight, bias, mean, scale, count.clamp(min=1))
        ctx.window, ctx.six = window, six
        ctx.mark_non_differentiable(mean, var, count)
        return y, mean, var, count

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        from fedloom.kernels import norms

        x, place, kept, mask, weight, bias, mean, scale, count = ctx.saved_tensors
        dy = dy.contiguous()
        norm = mean, scale, weight, bias
        at = x if kept is None else kept
        sums = norms.sums(at.flatten(3), dy.flatten(3), *norm, gated=True, six=ctx.six)
        dx = norms.chain_back(x, dy, place, mask, norm, sums, count, ctx.window, six=ctx.six)
        return dx, None, *slopes(sums, weight), None, None, None, None


class _CohortTappedActivation(torch.autograd.Function):
    """x: (clients, batch, channels, height, width)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, window: Pair, six: bool, keep: bool, summed: bool) -> tuple[Tensor, ...]:
        from fedloom.kernels import patches

        x = x.contiguous()
        act = None if summed else torch.empty_like(x)
        y, place, _ = patches.chained(x, window, None, six=six, keep=keep, act=act)
        ctx.window, ctx.six = window, six
        return y, *_handed_out(ctx, x if act is None else act, place, (), summed=summed)

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *given: Tensor) -> tuple[Tensor | None, ...]:
        return _before_relu(ctx, dy, given, *ctx.saved_tensors), None, None, None, None


class _CohortTappedChain(torch.autograd.Function):
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
        summed: bool,
    ) -> tuple[Tensor, ...]:
        from fedloom.kernels import patches

        x, mask, weight, bias, mean, var, count, scale = _measured(x, mask, weight, bias, eps)
        act = torch.empty_like(x)
        y, place, _ = patches.chained(x, window, (mean, scale, weight, bias), six=six, keep=keep, act=act)
        ctx.window, ctx.six = window, six
        ctx.mark_non_differentiable(mean, var, count)
        others = x, mask, weight, mean, scale, count.clamp(min=1)
        return y, *_handed_out(ctx, act, place, others, summed=summed), mean, var, count

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *given: Any) -> tuple[Tensor | None, ...]:
        from fedloom.kernels import norms

        x, mask, weight, mean, scale, count, *maps = ctx.saved_tensors
        arrived = _before_relu(ctx, dy, given, *maps)
        dx, sums = norms.back(x.flatten(3), arrived.flatten(3), mask, mean, scale, weight, count)
        return dx.view(x.shape), None, *slopes(sums, weight), None, None, None, None, None


def _handed_out(
    ctx: Any, z: Tensor, place: Tensor | None, others: tuple[Tensor | None, ...], *, summed: bool
) -> tuple[Tensor, ...]:
    """What a ReLU returns, or means and negative entropies of that, for which its input will do; the way back is provided for."""
    from fedloom.kernels import softmaxes

    if not summed:
        ctx.save_for_backward(*others, z, place)
        return (z,)
    mean, entropy, value, log_sum = softmaxes.summed_up(z.flatten(0, 1).flatten(2), relu=True, six=ctx.six)
    ctx.save_for_backward(*others, z, place, value, log_sum)
    return mean.view(z.shape[:3]), entropy.view(z.shape[:2])


def _before_relu(ctx: Any, dy: Tensor, given: Sequence[Tensor], z: Tensor, place: Tensor, *kept: Tensor) -> Tensor:
    """The gradient in front of a ReLU whose output is pooled and used itself, or summed up (then with what was kept for it)."""
    from fedloom.kernels import patches, softmaxes

    dy = dy.contiguous()
    if kept:
        (value, log_sum), (d_mean, d_entropy) = kept, (d.contiguous() for d in given[:2])
        flat, pooled = z.flatten(0, 1).flatten(2), (dy.flatten(0, 1), place, z.shape[-1], ctx.window)
        found = softmaxes.summed_up_back(flat, value, log_sum, d_mean, d_entropy, pooled, six=ctx.six)
        return found.view(z.shape)
    flat = z.flatten(1, 2)
    tapped = flat, given[0].contiguous().flatten(1, 2)
    found = patches.returned(dy.flatten(1, 2), place.flatten(1, 2), flat.shape, ctx.window, tapped, six=ctx.six)
    return found.view(z.shape)
