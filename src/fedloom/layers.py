"""Layers that know about padding rows, take their noise from a counter, and know of cohorts on a GPU.

Before a run, such layers of the user's model are turned into these by class; names of leaves stay as
they are. Outside of fedloom's forward pass they behave as the originals do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from fedloom import kernels
from fedloom.encoders import DenseEncoder, TwiceLayerNorm
from fedloom.frames import Frame, current, uniform_like
from fedloom.kernels.geometry import Steps
from fedloom.recurrent import MappedGRU, MappedLSTM, MappedRNN

FUSE = True
"""Whether chains of layers go through one kernel where it serves them; False to compare."""


class _Dropout(nn.modules.dropout._DropoutNd):
    """Dropout with counter noise: equal in a loop, under vmap and with padding rows."""

    keep_axes: int | None = None  # axes that have noise of their own; None for all

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return input
        axes = input.dim() if self.keep_axes is None else self.keep_axes
        shape = (*input.shape[:axes], *[1] * (input.dim() - axes))
        keep = (uniform_like(input, shape) >= self.p).to(input.dtype)
        return input * (keep / (1.0 - self.p) if self.p < 1.0 else keep)


class CounterDropout(_Dropout, nn.Dropout):
    """``nn.Dropout`` with counter noise."""


class _ChannelDropout(_Dropout):
    keep_axes = 2


class CounterDropout1d(_ChannelDropout, nn.Dropout1d):
    """``nn.Dropout1d`` with counter noise."""


class CounterDropout2d(_ChannelDropout, nn.Dropout2d):
    """``nn.Dropout2d`` with counter noise."""


class CounterDropout3d(_ChannelDropout, nn.Dropout3d):
    """``nn.Dropout3d`` with counter noise."""


class _MaskedBatchNorm(nn.modules.batchnorm._BatchNorm):
    """Batch normalisation whose statistics are those of the real rows."""

    def forward(self, input: Tensor) -> Tensor:
        frame = current()
        by_batch = self.training or self.running_mean is None
        if frame is None or not by_batch:
            return self._plain(input)
        if input.dim() > 2 and _normalises(self, input, frame):
            y, mean, var, count = kernels.normalised(input, frame.mask, self.weight, self.bias, self.eps)
            if self.training and self.running_mean is not None:
                self._track(mean, var, count)
            return y
        if frame.mask is None:
            # One test row of a layer without running statistics: torch refuses, though there is nothing wrong with it.
            alone = not self.training and input.numel() == input.shape[1]
            return self._masked(input, input.new_ones(1)) if alone else self._plain(input)
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        return self._masked(input, frame.mask)

    def _plain(self, x: Tensor) -> Tensor:
        """As torch computes it; short types in the leaves' own type, which torch does itself except under ``vmap``."""
        own = next((t.dtype for t in (self.weight, self.running_mean) if t is not None), x.dtype)
        torchs = own == x.dtype or not kernels.mapped(x)
        return super().forward(x) if torchs else super().forward(x.to(own)).to(x.dtype)

    def _masked(self, x: Tensor, rows: Tensor) -> Tensor:
        weight = rows.to(x.dtype).reshape(-1, *[1] * (x.dim() - 1))
        axes = [0, *range(2, x.dim())]
        count = weight.sum() * (x[0, 0].numel())
        safe = count.clamp(min=1)
        mean = (x * weight).sum(axes, keepdim=True) / safe
        centred = x - mean
        var = (centred * centred * weight).sum(axes, keepdim=True) / safe
        if self.training and self.running_mean is not None and self.running_var is not None:
            self._track(mean.detach().reshape(-1), var.detach().reshape(-1), count.detach())
        y = centred * torch.rsqrt(var + self.eps)
        if self.weight is not None:
            shape = (1, -1, *[1] * (x.dim() - 2))
            y = y * self.weight.reshape(shape) + self.bias.reshape(shape)
        return y

    def _track(self, mean: Tensor, var: Tensor, count: Tensor) -> None:
        assert self.running_mean is not None and self.running_var is not None
        moved = (count > 0).to(mean.dtype)
        unbiased = var * (count / (count - 1).clamp(min=1))
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(moved.to(self.num_batches_tracked.dtype))
        if self.momentum is None:
            assert self.num_batches_tracked is not None
            rate = moved / self.num_batches_tracked.to(mean.dtype).clamp(min=1)
        else:
            rate = moved * self.momentum
        self.running_mean.mul_(1 - rate).add_(rate * mean)
        self.running_var.mul_(1 - rate).add_(rate * unbiased)


class MaskedBatchNorm1d(_MaskedBatchNorm, nn.BatchNorm1d):
    """``nn.BatchNorm1d`` that leaves padding rows out."""


class MaskedBatchNorm2d(_MaskedBatchNorm, nn.BatchNorm2d):
    """``nn.BatchNorm2d`` that leaves padding rows out."""


class MaskedBatchNorm3d(_MaskedBatchNorm, nn.BatchNorm3d):
    """``nn.BatchNorm3d`` that leaves padding rows out."""


def _inside(x: Tensor) -> bool:
    """Whether a tensor is inside ``vmap``, of a gradient of many clients too."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(x))


class MappedEmbedding(nn.Embedding):
    """``nn.Embedding`` whose padding row gets no gradient, which ``vmap`` forgets."""

    def forward(self, input: Tensor) -> Tensor:
        if self.padding_idx is None or self.max_norm is not None or not _inside(self.weight):
            return super().forward(input)
        padding = torch.arange(self.num_embeddings, device=self.weight.device)[:, None] == self.padding_idx
        return nn.functional.embedding(input, torch.where(padding, self.weight.detach(), self.weight))


class CohortConv2d(nn.Conv2d):
    """``nn.Conv2d`` that computes a cohort on CUDA at once, where that pays."""

    def forward(self, input: Tensor) -> Tensor:
        x, weight, bias = kernels.shortened(input, self.weight, self.bias)
        steps, y = self.steps(), None
        if steps is not None and input.dim() == 4:
            served = kernels.convolved if self.groups == 1 else kernels.filtered
            y = served(x, weight, bias, *steps)
        return self._conv_forward(x, weight, bias) if y is None else y

    def steps(self) -> Steps | None:
        """Stride, padding and dilation where kernels can serve; None for some groups and for borders that are not of zeros."""
        whole = self.groups == 1 or self.groups == self.in_channels == self.out_channels
        if not whole or self.padding_mode != "zeros" or isinstance(self.padding, str):
            return None
        (a, b), (c, d), (e, f) = self.stride, self.padding, self.dilation
        return (int(a), int(b)), (int(c), int(d)), (int(e), int(f))


class CohortLinear(nn.Linear):
    """``nn.Linear`` that computes a cohort on CUDA at once."""

    def forward(self, input: Tensor) -> Tensor:
        return kernels.linear(input, self.weight, self.bias)


class CohortMaxPool2d(nn.MaxPool2d):
    """``nn.MaxPool2d`` with a kernel of its own for a cohort on CUDA, where windows do not overlap."""

    def forward(self, input: Tensor) -> Tensor:
        window = self.window()
        if window is not None and kernels.serves(input):
            return kernels.pooled(input, window)
        y: Tensor = super().forward(input)
        return y

    def window(self) -> tuple[int, int] | None:
        """Height and width of the windows if a kernel serves them, which do not overlap then."""
        size, stride, padding, dilation = (
            (v, v) if isinstance(v, int) else (v[0], v[1])
            for v in (self.kernel_size, self.stride, self.padding, self.dilation)
        )
        plain = size == stride and padding == (0, 0) and dilation == (1, 1) and not self.ceil_mode
        return size if plain and not self.return_indices and max(size) <= 8 else None


class _Chained(nn.Sequential):
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
    """As :func:`_chain`, of a convolution, ReLU and pooling, where no gradient is asked for.

    One kernel makes all of it of short patches. Of longer ones, where all clients share the filters, channels lie last, and stay so
    where the model allows it (``last``): cuDNN would turn maps that way and back; the bias is added where windows are read, which
    cuDNN would do in a pass over the whole map.
    """
    behind = [i for i in range(at + 1, len(parts)) if type(parts[i]) is not nn.Identity][:2]
    if len(behind) < 2 or torch.is_grad_enabled():
        return None
    conv, relu, pool = parts[at], *(parts[i] for i in behind)
    if type(conv) is not CohortConv2d or type(relu) not in _RELUS or type(pool) is not CohortMaxPool2d:
        return None
    window, steps = pool.window(), conv.steps() if conv.groups == 1 else None
    end, six = behind[1] + 1, type(relu) is nn.ReLU6
    if window is None or x.dim() != 4 or not x.numel() or not kernels.serves(x):
        return None
    heard = _heard(parts[at:end], names[at:end], current())
    if any(h is not False for h in heard[:-1]) or heard[-1] is None:
        return None
    x, weight, bias = kernels.shortened(x, conv.weight, conv.bias)
    y = None if steps is None else kernels.opened(x, weight, bias, steps, window, six=six, last=last)
    if y is None:
        if bias is None or _inside(conv.weight) or _inside(bias):
            return None
        x = conv._conv_forward(x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2), weight, None)
        window = _window(pool, x.shape[2:], whole=False)
        if window is None:
            return x + bias[:, None, None], at + 1
        y = kernels.acted_last(x, bias, window, six=six)
        y = y if last else y.contiguous()
    _tell(pool, x, y)
    return y, end


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


def _normalises(norm: nn.modules.batchnorm._BatchNorm, x: Tensor, frame: Frame) -> bool:
    """Whether a kernel serves a normalisation by batch, of which clients may share the weight."""
    return kernels.serves(x, frame.mask, shared=[t for t in (norm.weight, norm.bias) if t is not None])


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


_RELUS = (nn.ReLU, nn.ReLU6)
_TAPS = "fedloom.network"  # hooks that are registered there ask the frame whether they are wanted

_SWAPS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Conv2d: CohortConv2d,
    nn.Linear: CohortLinear,
    nn.Embedding: MappedEmbedding,
    nn.MaxPool2d: CohortMaxPool2d,
    nn.Dropout: CounterDropout,
    nn.Dropout1d: CounterDropout1d,
    nn.Dropout2d: CounterDropout2d,
    nn.Dropout3d: CounterDropout3d,
    nn.BatchNorm1d: MaskedBatchNorm1d,
    nn.BatchNorm2d: MaskedBatchNorm2d,
    nn.BatchNorm3d: MaskedBatchNorm3d,
    nn.LSTM: MappedLSTM,
    nn.GRU: MappedGRU,
    nn.RNN: MappedRNN,
    nn.TransformerEncoder: DenseEncoder,
    nn.LayerNorm: TwiceLayerNorm,
}


def prepare(module: nn.Module) -> None:
    """Turns the layers of a module that have a twin here into it, in place, by exact type; containers then look for chains."""
    for part in module.modules():
        if type(part) in _SWAPS:
            part.__class__ = _SWAPS[type(part)]
    places = Counter(id(child) for part in module.modules() for child in part._modules.values())
    for path, part in module.named_modules():
        inherits = isinstance(part, nn.Sequential) and type(part).forward is nn.Sequential.forward
        if inherits and "forward" not in vars(part) and _has_chain(tuple(part._modules.values())):
            alone = [c is not None and places[id(c)] == 1 and "forward" not in vars(c) for c in part._modules.values()]
            names = [f"{path}.{name}" if path else name for name in part._modules]
            vars(part)["_chain_names"] = tuple(n if ok else None for n, ok in zip(names, alone, strict=True))
            vars(part)["_chain_last"] = False
            vars(part)["forward"] = MethodType(_Chained.forward, part)


def _has_chain(parts: tuple[Any, ...]) -> bool:
    """Whether normalisation and ReLU, or ReLU and pooling, follow each other."""
    pairs = [(type(a), type(b)) for a, b in pairwise(parts)]
    return any((a is MaskedBatchNorm2d and b in _RELUS) or (a in _RELUS and b is CohortMaxPool2d) for a, b in pairs)


def restore(module: nn.Module) -> None:
    """Turns our layers back into torch's, in place: what a user gets is the user's own module."""
    back = {ours: theirs for theirs, ours in _SWAPS.items()}
    for part in module.modules():
        if type(part) in back:
            part.__class__ = back[type(part)]
        if isinstance(part, nn.RNNBase):
            part._flat_weights = [getattr(part, name) for name in part._flat_weights_names]
        if getattr(vars(part).get("forward"), "__func__", None) is _Chained.forward:
            del vars(part)["forward"], vars(part)["_chain_names"], vars(part)["_chain_last"]


def is_norm(module: nn.Module) -> bool:
    """Whether a module is batch normalisation, by type."""
    return isinstance(module, nn.modules.batchnorm._BatchNorm)


def is_noisy(module: nn.Module) -> bool:
    """Whether a module draws noise in training."""
    return isinstance(module, _Dropout) or getattr(module, "draws_noise", False)
