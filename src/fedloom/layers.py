"""Layers that know about padding rows, take their noise from a counter, and know of cohorts on a GPU.

Before a run, such layers of the user's model are turned into these by class (:mod:`fedloom.swaps`); names of leaves stay as
they are. Outside of fedloom's forward pass they behave as the originals do.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedloom import kernels
from fedloom.frames import Frame, current, uniform_like
from fedloom.kernels.geometry import Steps


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


def _normalises(norm: nn.modules.batchnorm._BatchNorm, x: Tensor, frame: Frame) -> bool:
    """Whether a kernel serves a normalisation by batch, of which clients may share the weight."""
    return kernels.serves(x, frame.mask, shared=[t for t in (norm.weight, norm.bias) if t is not None])


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


def is_norm(module: nn.Module) -> bool:
    """Whether a module is batch normalisation, by type."""
    return isinstance(module, nn.modules.batchnorm._BatchNorm)


def is_noisy(module: nn.Module) -> bool:
    """Whether a module draws noise in training."""
    return isinstance(module, _Dropout) or getattr(module, "draws_noise", False)
