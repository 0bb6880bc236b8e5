"""Chains of layers of a container that a kernel takes at once: [convolution,] [normalisation,] ReLU [and pooling]."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from fedloom.frames import Frame, current
from fedloom.gpu import fusions
from fedloom.gpu.cohort import serves, serves_norm
from fedloom.gpu.geometry import steps_of, window_of
from fedloom.layers import CohortConv2d, MaskedBatchNorm2d
from fedloom.swaps import ADDED

FUSE = True
"""Whether chains of layers go through one kernel where it serves them; False to compare."""
_RELUS = (nn.ReLU, nn.ReLU6)
_TAPS = "fedloom.network"  # hooks that are registered there ask the frame whether they are wanted


class Chained(nn.Sequential):
    """A container that takes normalisation, ReLU and pooling at once where a kernel serves a cohort.

    Containers of any class borrow its ``forward``. A chain ends where somebody listens to a layer inside of it; but
    where the frame wants a summary of what the ReLU behind a first convolution returns, the kernel makes it along with the rest.
    """

    _chain_names: tuple[str | None, ...]  # of its layers in the whole model; None for those that no chain may have

    def forward(self, input: Any) -> Any:
        parts, at = tuple(self._modules.values()), 0
        while at < len(parts):
            taken = None
            if FUSE and isinstance(input, Tensor):
                taken = _chain(parts, self._chain_names, at, input) or _pooled(parts, self._chain_names, at, input)
            input, at = (parts[at](input), at + 1) if taken is None else taken
        return input


def _chain(parts: tuple[Any, ...], names: tuple[str | None, ...], at: int, x: Tensor) -> tuple[Tensor, int] | None:
    """What the chain that begins at layer ``at`` returns, and the layer behind it; None where no kernel serves."""
    norm = parts[at] if type(parts[at]) is MaskedBatchNorm2d else None
    end = at + 1 if norm is None else at + 2
    if end > len(parts) or type(parts[end - 1]) not in _RELUS or not serves(x):
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
    window = None
    if end < len(parts) and listening[end - 1] is False and listening[end] is not None:
        window = _window(parts[end], x.shape[2:])
    six = type(relu) is nn.ReLU6
    window, end = ((1, 1), end) if window is None else (window, end + 1)
    if norm is not None:
        assert frame is not None
        y, mean, var, count = fusions.chained(x, frame.mask, norm.weight, norm.bias, norm.eps, window, six=six)
        if norm.training and norm.running_mean is not None:
            norm._track(mean, var, count)
    elif window != (1, 1):
        y = fusions.acted(x, window, six=six)
    else:
        return None
    _tell(parts[end - 1], x, y)
    return y, end


def _pooled(parts: tuple[Any, ...], names: tuple[str | None, ...], at: int, x: Tensor) -> tuple[Tensor, int] | None:
    """As :func:`_chain`, of a convolution, ReLU and pooling.

    One kernel makes all of it of short patches, if no gradient of ``x`` is asked for, and can sum up what ReLU and pooling return.
    """
    behind = [i for i in range(at + 1, len(parts)) if type(parts[i]) is not nn.Identity][:2]
    if len(behind) < 2:
        return None
    conv, relu, pool = parts[at], *(parts[i] for i in behind)
    if type(conv) is not CohortConv2d or type(relu) not in _RELUS or type(pool) is not nn.MaxPool2d:
        return None
    window, end, six = window_of(pool), behind[1] + 1, type(relu) is nn.ReLU6
    if window is None or x.dim() != 4 or not x.numel() or not serves(x):
        return None
    frame, steps = current(), steps_of(conv) if conv.groups == 1 else None
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
        both = pool_name in frame.summed
        made = fusions.opened_summed(x, weight, bias, steps, window, six=six, pooled=both)
        if made is None:
            return None
        output, (frame.summaries[relu_name], *others) = made
        if both:
            frame.summaries[pool_name] = others[0]
        else:
            _tell(pool, x, output)
        return output, end
    y = None if steps is None else fusions.opened(x, weight, bias, steps, window, six=six)
    if y is None:
        return None
    _tell(pool, x, y)
    return y, end


def _tell(part: nn.Module, x: Tensor, y: Tensor) -> None:
    """Calls those who listen to a layer that was computed in a chain."""
    for hook in part._forward_hooks.values():
        hook(part, (x,), y)


def _window(part: nn.Module, size: torch.Size) -> tuple[int, int] | None:
    """The windows of a pooling layer that a chain can take along; None for other layers."""
    window = window_of(part) if type(part) is nn.MaxPool2d else None
    return None if window is None or any(k > side for k, side in zip(window, size, strict=True)) else window


def _fits(norm: MaskedBatchNorm2d, x: Tensor, frame: Frame | None) -> bool:
    """Whether a layer normalises by what a kernel computes: the statistics of a cohort's batches."""
    by_batch = norm.training or norm.running_mean is None
    whole = norm.num_features == x.shape[1] and (norm.weight is None) == (norm.bias is None)
    return frame is not None and by_batch and whole and serves_norm(norm, x, frame)


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


def fuse(module: nn.Module) -> None:
    """Lets the containers of a prepared module look for chains; what is added to them is noted for :func:`fedloom.swaps.restore`."""
    places = Counter(id(child) for part in module.modules() for child in part._modules.values())
    for path, part in module.named_modules():
        inherits = isinstance(part, nn.Sequential) and type(part).forward is nn.Sequential.forward
        if inherits and "forward" not in vars(part) and _has_chain(tuple(part._modules.values())):
            alone = [c is not None and places[id(c)] == 1 and "forward" not in vars(c) for c in part._modules.values()]
            names = [f"{path}.{name}" if path else name for name in part._modules]
            vars(part)["_chain_names"] = tuple(n if ok else None for n, ok in zip(names, alone, strict=True))
            vars(part)["forward"] = MethodType(Chained.forward, part)
            vars(part)[ADDED] = ("forward", "_chain_names")


def _has_chain(parts: tuple[Any, ...]) -> bool:
    """Whether normalisation and ReLU, or ReLU and pooling, follow each other."""
    pairs = [(type(a), type(b)) for a, b in pairwise(parts)]
    return any((a is MaskedBatchNorm2d and b in _RELUS) or (a in _RELUS and b is nn.MaxPool2d) for a, b in pairs)
