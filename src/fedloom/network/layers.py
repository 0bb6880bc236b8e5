"""Layers that know about padding rows, take their noise from a counter, and work under ``vmap``.

Before a run, such layers of the user's model are turned into these by class (:mod:`fedloom.network.replace_layers`); names of leaves stay as
they are. Outside of fedloom's forward pass they behave as the originals do.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedloom import ops, torch_internals
from fedloom.ops import in_autocast_type, operator
from fedloom.ops.forward_context import Frame, current, uniform_like
from fedloom.torch_internals import check_input_dim, convolve, is_wrapped


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
        return self._plain(input) if frame is None or not by_batch else batch_norm(self, input, frame)

    def _plain(self, x: Tensor) -> Tensor:
        """As torch computes it; short types in the leaves' own type, which torch does itself except under ``vmap``."""
        own = next((t.dtype for t in (self.weight, self.running_mean) if t is not None), x.dtype)
        torchs = own == x.dtype or not torch_internals.is_batched(x)
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


@operator
def batch_norm(norm: _MaskedBatchNorm, x: Tensor, frame: Frame) -> Tensor:
    """Normalise a batch by the statistics of its real rows. In training mode, update the layer's running statistics."""
    if frame.mask is None:
        # One test row of a layer without running statistics: torch refuses, though there is nothing wrong with it.
        alone = not norm.training and x.numel() == x.shape[1]
        return norm._masked(x, x.new_ones(1)) if alone else norm._plain(x)
    check_input_dim(norm, x)
    return norm._masked(x, frame.mask)


class MaskedBatchNorm1d(_MaskedBatchNorm, nn.BatchNorm1d):
    """``nn.BatchNorm1d`` that leaves padding rows out."""


class MaskedBatchNorm2d(_MaskedBatchNorm, nn.BatchNorm2d):
    """``nn.BatchNorm2d`` that leaves padding rows out."""


class MaskedBatchNorm3d(_MaskedBatchNorm, nn.BatchNorm3d):
    """``nn.BatchNorm3d`` that leaves padding rows out."""


class MappedEmbedding(nn.Embedding):
    """``nn.Embedding`` whose padding row gets no gradient, which ``vmap`` forgets."""

    def forward(self, input: Tensor) -> Tensor:
        if self.padding_idx is None or self.max_norm is not None or not is_wrapped(self.weight):
            return super().forward(input)
        padding = torch.arange(self.num_embeddings, device=self.weight.device)[:, None] == self.padding_idx
        return nn.functional.embedding(input, torch.where(padding, self.weight.detach(), self.weight))


@operator
def convolution(layer: nn.Conv2d, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Apply a convolution with this weight and bias to x (batch, channels, height, width)."""
    return convolve(layer, x, weight, bias)


class CohortConv2d(nn.Conv2d):
    """``nn.Conv2d`` as an operator, which computes in the dtype of autocast under ``vmap`` too."""

    def forward(self, input: Tensor) -> Tensor:
        return convolution(self, *in_autocast_type(input, self.weight, self.bias))


class CohortLinear(nn.Linear):
    """``nn.Linear`` as an operator."""

    def forward(self, input: Tensor) -> Tensor:
        return ops.linear(input, self.weight, self.bias)


def is_norm(module: nn.Module) -> bool:
    """Whether a module is batch normalisation, by type."""
    return isinstance(module, nn.modules.batchnorm._BatchNorm)


def is_noisy(module: nn.Module) -> bool:
    """Whether a module draws noise in training."""
    return isinstance(module, _Dropout) or getattr(module, "draws_noise", False)
