"""What is asked of tapped features. Each formula is written here once."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from fedloom import kernels
from fedloom.resizing import resized
from fedloom.types import Batch
from fedloom.view import View


def pooled(z: Tensor, axis: int = 1) -> Tensor:
    """Rows x channels: the mean over all positions (pixels of a map, tokens)."""
    z = z.movedim(axis, 1)
    return z if z.dim() == 2 else z.flatten(2).mean(2)


def adapted(z: Tensor, weight: Tensor, bias: Tensor, axis: int, like: Tensor, *, dense: bool) -> Tensor:
    """Output of an adapter: a 1x1 convolution resized to the labels for dense tasks, else linear on pooled features."""
    if not dense:
        return kernels.linear(pooled(z, axis), weight, bias)
    logits = F.conv2d(z.movedim(axis, 1), weight[:, :, None, None], bias)
    return resized(logits, like.shape[-2:])


def information_term(view: View, z: Tensor, weight: Tensor, bias: Tensor, axis: int = 1) -> Tensor:
    """``MI_m = CE(q^m(z^m), y)``: the task's loss of the adapter's output, a mean over rows or valid pixels.

    ``H(Y) - MI_m`` is a lower bound of the mutual information of features and labels. It is deep supervision with a linear
    auxiliary classifier.

    Reference: OmniISR, eqs. 2 and 3, as means.
    """
    dense = view.structure.task == "segmentation"
    return view.loss(adapted(z, weight, bias, axis, view.batch.y, dense=dense))


def entropy_term(z: Tensor, batch: Batch, axis: int = 1) -> Tensor:
    """``NE_m``: the mean over rows and positions of ``sum_c p_c log p_c``, p the softmax over the channels of z^m.

    It lies between ``-log C`` (equal channels) and 0.

    Example:
        >>> import torch
        >>> batch = Batch(torch.zeros(2, 1), torch.zeros(2))
        >>> round(float(entropy_term(torch.ones(2, 4, 3, 3), batch)), 6)
        -1.386294

    Reference: OmniISR, eq. 4, as a mean.
    """
    z = z.movedim(axis, 1)
    found = kernels.summarised(z)
    return batch.mean(_entropies(z) if found is None else found[1])


def both_terms(
    view: View, z: Tensor, weight: Tensor, bias: Tensor, batch: Batch, axis: int = 1
) -> tuple[Tensor, Tensor]:
    """``MI_m`` and ``NE_m`` of one feature, as :func:`information_term` and :func:`entropy_term` have them.

    Where the adapter reads pooled features, a kernel makes both means over positions in one pass, and their gradient in another.
    """
    found = None if view.structure.task == "segmentation" else kernels.summarised(z.movedim(axis, 1))
    if found is None:
        return information_term(view, z, weight, bias, axis), entropy_term(z, batch, axis)
    return information_term(view, found[0], weight, bias), batch.mean(found[1])


def _entropies(z: Tensor) -> Tensor:
    """Per row the mean over positions of ``sum_c p_c log p_c``; channels are axis 1."""
    logs = F.log_softmax(z, 1)
    return (logs.exp() * logs).sum(1).reshape(z.shape[0], -1).mean(1)
