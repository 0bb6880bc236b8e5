"""Fusion of consecutive layers of an ``nn.Sequential``: [convolution,] [normalisation,] ReLU [and pooling]."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from fedloom.gpu.batch_norm import can_normalise
from fedloom.gpu.cohort import is_cohort
from fedloom.gpu.conv_relu_pool import conv_relu_pool, conv_relu_pool_summary
from fedloom.gpu.conv_shapes import Pair, conv_parameters, pool_window
from fedloom.gpu.relu_pool import norm_relu_pool, relu_pool
from fedloom.network.layers import CohortConv2d, MaskedBatchNorm2d
from fedloom.network.replace_layers import ADDED
from fedloom.ops.forward_context import Frame, current

_RELUS = (nn.ReLU, nn.ReLU6)
_TAP_MODULE = "fedloom.network.functional"  # its hooks read only the outputs that the frame lists
Layers = tuple[Any, ...]
Names = tuple[str | None, ...]
"""Names of the layers in the model; None for layers that no fusion may contain."""


def fuse_layers(module: nn.Module) -> None:
    """Let the containers of a module fuse their layers. Plain form: :func:`fedloom.network.replace_layers.fuse_layers`.

    ``fedloom.network.replace_layers.restore`` removes the attributes that this function adds.
    """
    uses = Counter(id(child) for part in module.modules() for child in part._modules.values())
    for path, part in module.named_modules():
        is_plain = isinstance(part, nn.Sequential) and type(part).forward is nn.Sequential.forward
        if is_plain and "forward" not in vars(part) and _can_fuse(tuple(part._modules.values())):
            single = [c is not None and uses[id(c)] == 1 and "forward" not in vars(c) for c in part._modules.values()]
            names = [f"{path}.{name}" if path else name for name in part._modules]
            vars(part)["_fedloom_layer_names"] = tuple(n if ok else None for n, ok in zip(names, single, strict=True))
            vars(part)["forward"] = MethodType(forward, part)
            vars(part)[ADDED] = ("forward", "_fedloom_layer_names")


def _can_fuse(layers: Layers) -> bool:
    """Return whether a ReLU follows a normalisation, or a pooling a ReLU."""
    pairs = [(type(a), type(b)) for a, b in pairwise(layers)]
    return any((a is MaskedBatchNorm2d and b in _RELUS) or (a in _RELUS and b is nn.MaxPool2d) for a, b in pairs)


def forward(container: Any, input: Any) -> Any:
    """Run the layers of a container in order, fused where a kernel supports them.

    A fusion ends at a layer whose output somebody reads; pooling behind a ReLU has a kernel of its own then. If the frame
    requests only a summary of the ReLU behind a first convolution, the fused kernel computes it.
    """
    layers, at = tuple(container._modules.values()), 0
    while at < len(layers):
        fused = _run_fused(layers, container._fedloom_layer_names, at, input) if isinstance(input, Tensor) else None
        input, at = (layers[at](input), at + 1) if fused is None else fused
    return input


def _run_fused(layers: Layers, names: Names, at: int, x: Tensor) -> tuple[Tensor, int] | None:
    """Run the fused layers from ``at`` on; return their output and the index of the next layer, None without fusion."""
    fused = _norm_relu_pool(layers, names, at, x) or _conv_relu_pool(layers, names, at, x)
    return fused or _pool_relu_output(layers, names, at, x)


def _norm_relu_pool(layers: Layers, names: Names, at: int, x: Tensor) -> tuple[Tensor, int] | None:
    """Run [normalisation,] ReLU [and pooling] if they start at layer ``at``."""
    norm = layers[at] if type(layers[at]) is MaskedBatchNorm2d else None
    end = at + 1 if norm is None else at + 2
    if end > len(layers) or type(layers[end - 1]) not in _RELUS or not is_cohort(x):
        return None
    frame, relu = current(), layers[end - 1]
    wanted = _wanted(layers, names, frame)
    if x.dim() != 4 or not x.numel() or not x.is_floating_point() or wanted[end - 1] is None:
        return None
    if norm is not None and (wanted[at] is not False or not _can_normalise(norm, x, frame)):
        return None
    # A ReLU in place changes its input, which others may hold unless the previous layer of the container has created it.
    created = at > 0 and type(layers[at - 1]) in (CohortConv2d, MaskedBatchNorm2d) and wanted[at - 1] is not None
    if norm is None and relu.inplace and not created:
        return None
    window = None
    if end < len(layers) and wanted[end - 1] is False and wanted[end] is not None:
        window = _window(layers[end], x.shape[2:])
    relu6 = type(relu) is nn.ReLU6
    window, end = ((1, 1), end) if window is None else (window, end + 1)
    if norm is not None:
        assert frame is not None
        y, mean, var, count = norm_relu_pool(x, frame.mask, norm.weight, norm.bias, norm.eps, window, relu6=relu6)
        if norm.training and norm.running_mean is not None:
            norm._track(mean, var, count)
    elif window != (1, 1):
        y = relu_pool(x, window, relu6=relu6)
    else:
        return None
    _call_hooks(layers[end - 1], x, y)
    return y, end


def _conv_relu_pool(layers: Layers, names: Names, at: int, x: Tensor) -> tuple[Tensor, int] | None:
    """Run convolution, ReLU and pooling if they start at layer ``at``."""
    following = [i for i in range(at + 1, len(layers)) if type(layers[i]) is not nn.Identity][:2]
    if len(following) < 2:
        return None
    conv, relu, pool = layers[at], *(layers[i] for i in following)
    if type(conv) is not CohortConv2d or type(relu) not in _RELUS or type(pool) is not nn.MaxPool2d:
        return None
    window, end = pool_window(pool), following[1] + 1
    parameters = conv_parameters(conv) if conv.groups == 1 else None
    if window is None or parameters is None or x.dim() != 4 or not x.numel() or not is_cohort(x):
        return None
    frame = current()
    wanted = _wanted(layers[at:end], names[at:end], frame)
    relu_wanted = wanted.pop(following[0] - at)
    if relu_wanted is None or any(w is not False for w in wanted[:-1]) or wanted[-1] is None:
        return None
    arguments, relu6 = (x, conv.weight, conv.bias, parameters, window), type(relu) is nn.ReLU6
    if not relu_wanted:
        y = conv_relu_pool(*arguments, relu6=relu6)
        if y is None:
            return None
        _call_hooks(pool, x, y)
        return y, end
    relu_name, pool_name = (names[i] for i in following)
    assert frame is not None and relu_name is not None and pool_name is not None  # only named layers are wanted
    if relu_name not in frame.summed:
        return None
    pooled = pool_name in frame.summed
    outputs = conv_relu_pool_summary(*arguments, relu6=relu6, pooled=pooled)
    if outputs is None:
        return None
    y, (frame.summaries[relu_name], *others) = outputs
    if pooled:
        frame.summaries[pool_name] = others[0]
    else:
        _call_hooks(pool, x, y)
    return y, end


def _pool_relu_output(layers: Layers, names: Names, at: int, x: Tensor) -> tuple[Tensor, int] | None:
    """Run pooling at layer ``at`` by the kernel for ReLU and pooling if ``x`` is a ReLU's output.

    A second ReLU changes no value, also behind ReLU6. It blocks a gradient only where the value is 0,
    and there the gradient of the first ReLU is 0. The gradient of a tap does not pass the pooling.
    """
    if not at or type(layers[at - 1]) not in _RELUS or x.dim() != 4 or not x.numel() or not is_cohort(x):
        return None
    window = _window(layers[at], x.shape[2:])
    if window is None or window == (1, 1) or not x.is_floating_point():
        return None
    # Other hooks than taps may replace the output of the ReLU.
    if None in _wanted(layers[at - 1 : at + 1], names[at - 1 : at + 1], current()):
        return None
    y = relu_pool(x, window)
    _call_hooks(layers[at], x, y)
    return y, at + 1


def _call_hooks(layer: nn.Module, x: Tensor, y: Tensor) -> None:
    """Call the forward hooks of a fused layer."""
    for hook in layer._forward_hooks.values():
        hook(layer, (x,), y)


def _window(layer: nn.Module, size: torch.Size) -> Pair | None:
    """Return the windows of a pooling layer for maps of a size; None if the layer cannot be fused."""
    window = pool_window(layer) if type(layer) is nn.MaxPool2d else None
    return None if window is None or any(k > n for k, n in zip(window, size, strict=True)) else window


def _can_normalise(norm: MaskedBatchNorm2d, x: Tensor, frame: Frame | None) -> bool:
    """Return whether a layer normalises by the statistics of a cohort's batches."""
    by_batch = norm.training or norm.running_mean is None
    whole = norm.num_features == x.shape[1] and (norm.weight is None) == (norm.bias is None)
    return frame is not None and by_batch and whole and can_normalise(norm, x, frame)


def _wanted(layers: Sequence[Any], names: Sequence[str | None], frame: Frame | None) -> list[bool | None]:
    """Return for each layer whether the frame wants its output; None if other hooks read it or the layer must be called."""
    wanted = frozenset[str]() if frame is None else frame.wanted
    return [None if _must_be_called(layer, name) else name in wanted for layer, name in zip(layers, names, strict=True)]


def _must_be_called(layer: nn.Module, name: str | None) -> bool:
    hooks = layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks or _has_any_global_hook()
    others = any(getattr(hook, "__module__", None) != _TAP_MODULE for hook in layer._forward_hooks.values())
    return name is None or bool(hooks) or others
