"""Chains of layers of a container that a kernel takes at once: [convolution,] [normalisation,] ReLU [and pooling]."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from fedloom import kernels
from fedloom.frames import Frame, current
from fedloom.layers import CohortConv2d, CohortMaxPool2d, MaskedBatchNorm2d, _inside, _MaskedBatchNorm, _normalises

FUSE = True
"""Whether chains of layers go through one kernel where it serves them; False to compare."""
_RELUS = (nn.ReLU, nn.ReLU6)
_TAPS = "fedloom.network"  # hooks that are registered there ask the frame whether they are wanted


class Chained(nn.Sequential):
    """A container that takes normalisation, ReLU and pooling at once where a kernel serves a cohort.

    Containers of any class borrow its ``forward``. A chain ends where somebody listens to a layer inside of it; but if it is the
    frame that wants what the ReLU returns, and windows fill the map, the kernel hands that out too.
    """

    _chain_names: tuple[str | None, ...]  # of its layers in the whole model; None for those that no chain may have
    _chain_last: bool  # whether maps may have their channels last behind it

    def forward(self, input: Any) -> Any:
        parts, at = tuple(self._modules.values()), 0
        while at < len(parts):
            taken = None
            if FUSE and isinstance(input, Tensor):
                names, last = self._chain_names, self._chain_last
                taken = _chain(parts, names, at, input) or _pooled(parts, names, at, input, last=last)
            input, at = (parts[at](input), at + 1) if taken is None else taken
        return input


def _chain(parts: tuple[Any, ...], names: tuple[str | None, ...], at: int, x: Tensor) -> tuple[Tensor, int] | None:
    """What the chain that begins at layer ``at`` returns, and the layer behind it; None where no kernel serves."""
    norm = parts[at] if type(parts[at]) is MaskedBatchNorm2d else None
    end = at + 1 if norm is None else at + 2
    if end > len(parts) or type(parts[end - 1]) not in _RELUS or not kernels.serves(x):
        return None
    frame, relu = current(), parts[end - 1]
    listening = _heard(parts, names, frame)
    if x.dim() != 4 or not x.numel() or not x.is_floating_point() or listening[end - 1] is None:
        return None
    if norm is not None and (listening[at] is not False or not _fits(norm, x, frame)):
        return None
    # A ReLU that works in place changes its input, which others may hold unless a layer here has just made it.
    fresh = at > 0 and type(parts[at - 1]) in (CohortConv2d, MaskedBatchNorm2d) and listening[at - 1] is not None
    if norm is None and relu.inplace and not fresh:
        return None
    heard, window = listening[end - 1] is True, None
    if end < len(parts) and listening[end] is not None:
        window = _window(parts[end], x.shape[2:], whole=heard)
    apart, six, name = heard and window is not None, type(relu) is nn.ReLU6, names[end - 1]
    summed = apart and frame is not None and name in frame.summed
    window, end = ((1, 1), end) if window is None else (window, end + 1)
    made: list[Any]
    if norm is not None:
        assert frame is not None
        call = kernels.chained_summed if summed else kernels.chained_apart if apart else kernels.chained
        *made, mean, var, count = call(x, frame.mask, norm.weight, norm.bias, norm.eps, window, six=six)
        if norm.training and norm.running_mean is not None:
            norm._track(mean, var, count)
    elif window != (1, 1):
        act = kernels.acted_summed if summed else kernels.acted_apart
        made = [*act(x, window, six=six)] if apart else [kernels.acted(x, window, six=six)]
    else:
        return None
    if summed and frame is not None and name is not None:
        frame.summaries[name] = made.pop()
    for part, output in zip(parts[end - len(made) : end], reversed(made), strict=True):
        _tell(part, x, output)
    return made[0], end


def _pooled(
    parts: tuple[Any, ...], names: tuple[str | None, ...], at: int, x: Tensor, *, last: bool
) -> tuple[Tensor, int] | None:
    """As :func:`_chain`, of a convolution, ReLU and pooling.

    One kernel makes all of it of short patches, if no gradient of ``x`` is asked for, and can sum up what ReLU and pooling return. Of longer
    patches, where all clients share the filters and nothing has a gradient, channels lie last, and stay so where the model allows it
    (``last``): cuDNN would turn maps that way and back; the bias is added where windows are read, which cuDNN would do in a pass over
    the whole map.
    """
    behind = [i for i in range(at + 1, len(parts)) if type(parts[i]) is not nn.Identity][:2]
    if len(behind) < 2:
        return None
    conv, relu, pool = parts[at], *(parts[i] for i in behind)
    if type(conv) is not CohortConv2d or type(relu) not in _RELUS or type(pool) is not CohortMaxPool2d:
        return None
    window, end, six = pool.window(), behind[1] + 1, type(relu) is nn.ReLU6
    if window is None or x.dim() != 4 or not x.numel() or not kernels.serves(x):
        return None
    frame, steps = current(), conv.steps() if conv.groups == 1 else None
    heard = _heard(parts[at:end], names[at:end], frame)
    tapped = heard.pop(behind[0] - at)
    if tapped is None or any(h is not False for h in heard[:-1]) or heard[-1] is None:
        return None
    weight, bias = conv.weight, conv.bias
    if tapped:
        relu_name, pool_name = (names[i] for i in behind)
        assert frame is not None and relu_name is not None and pool_name is not None  # who has no name is not heard
        if relu_name not in frame.summed or steps is None:
            return None
        both = pool_name in frame.summed and _lasts(pool, frame)
        made = kernels.opened_summed(x, weight, bias, steps, window, six=six, pooled=both)
        if made is None:
            return None
        output, (frame.summaries[relu_name], *others) = made
        if both:
            frame.summaries[pool_name] = others[0]
        else:
            _tell(pool, x, output)
        return output, end
    y = None if steps is None else kernels.opened(x, weight, bias, steps, window, six=six, last=last)
    if y is None:
        if bias is None or torch.is_grad_enabled() or _inside(weight) or _inside(bias):
            return None
        x, weight, bias = kernels.shortened(x, weight, bias)
        assert bias is not None
        x = conv._conv_forward(x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2), weight, None)
        window = _window(pool, x.shape[2:], whole=False)
        if window is None:
            return x + bias[:, None, None], at + 1
        y = kernels.acted_last(x, bias, window, six=six)
        y = y if last else y.contiguous()
    _tell(pool, x, y)
    return y, end


def _lasts(part: nn.Module, frame: Frame) -> bool:
    """Whether what a layer returns is still there on the way back, for all that is known of layers behind it."""
    return frame.rewrite is None and all(getattr(hook, "lasts", False) for hook in part._forward_hooks.values())


def _tell(part: nn.Module, x: Tensor, y: Tensor) -> None:
    """Calls those who listen to a layer that was computed in a chain."""
    for hook in part._forward_hooks.values():
        hook(part, (x,), y)


def _window(part: nn.Module, size: torch.Size, *, whole: bool) -> tuple[int, int] | None:
    """The windows of a pooling layer that a chain can take along, ``whole`` if they must fill the map; None for other layers."""
    window = part.window() if type(part) is CohortMaxPool2d else None
    if window is None or any(k > side for k, side in zip(window, size, strict=True)):
        return None
    filled = window != (1, 1) and not any(side % k for k, side in zip(window, size, strict=True))
    return window if filled or not whole else None


def _fits(norm: _MaskedBatchNorm, x: Tensor, frame: Frame | None) -> bool:
    """Whether a layer normalises by what a kernel computes: the statistics of a cohort's batches."""
    by_batch = norm.training or norm.running_mean is None
    whole = norm.num_features == x.shape[1] and (norm.weight is None) == (norm.bias is None)
    return frame is not None and by_batch and whole and _normalises(norm, x, frame)


def _heard(parts: Sequence[Any], names: Sequence[str | None], frame: Frame | None) -> list[bool | None]:
    """Of each layer whether the frame wants its output, see :func:`_listening`."""
    wanted = frozenset[str]() if frame is None else frame.wanted
    return [_listening(part, name, wanted) for part, name in zip(parts, names, strict=True)]


def _listening(part: nn.Module, name: str | None, wanted: frozenset[str]) -> bool | None:
    """Whether the frame wants the output of a layer; None if somebody else may, or if it must be called itself."""
    others = part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks or _has_any_global_hook()
    if name is None or others or any(getattr(h, "__module__", None) != _TAPS for h in part._forward_hooks.values()):
        return None
    return name in wanted


def has_chain(parts: tuple[Any, ...]) -> bool:
    """Whether normalisation and ReLU, or ReLU and pooling, follow each other."""
    pairs = [(type(a), type(b)) for a, b in pairwise(parts)]
    return any((a is MaskedBatchNorm2d and b in _RELUS) or (a in _RELUS and b is CohortMaxPool2d) for a, b in pairs)
