"""What is asked of tapped features. Each formula is written here once."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from fedloom import ops
from fedloom.ops import pooled
from fedloom.ops.resize import resized
from fedloom.spec.view import View
from fedloom.tasks.batch import Batch
from fedloom.tensors import Summary


def adapted(z: Tensor, weight: Tensor, bias: Tensor, axis: int, like: Tensor, *, dense: bool) -> Tensor:
    """Output of an adapter: a 1x1 convolution resized to the labels for dense tasks, else linear on pooled features."""
    if not dense:
        return ops.linear(pooled(z, axis), weight, bias)
    logits = F.conv2d(z.movedim(axis, 1), weight[:, :, None, None], bias)
    return resized(logits, like.shape[-2:])


def information_term(view: View, z: Tensor | Summary, weight: Tensor, bias: Tensor, axis: int = 1) -> Tensor:
    """``MI_m = CE(q^m(z^m), y)``: the task's loss of the adapter's output, a mean over rows or valid pixels.

    ``H(Y) - MI_m`` is a lower bound of the mutual information of features and labels. It is deep supervision with a linear
    auxiliary classifier.

    Reference: OmniISR, eqs. 2 and 3, as means.
    """
    if view.structure.task == "segmentation" and isinstance(z, Tensor):
        return view.loss(adapted(z, weight, bias, axis, view.batch.y, dense=True))
    means = z[0] if isinstance(z, tuple) else pooled(z, axis)
    return view.classifier_loss(means, weight, bias)[0]


def entropy_term(z: Tensor | Summary, batch: Batch, axis: int = 1) -> Tensor:
    """``NE_m``: the mean over rows and positions of ``sum_c p_c log p_c``, p the softmax over the channels of z^m.

    It lies between ``-log C`` (equal channels) and 0.

    Example:
        >>> import torch
        >>> batch = Batch(torch.zeros(2, 1), torch.zeros(2))
        >>> round(float(entropy_term(torch.ones(2, 4, 3, 3), batch)), 6)
        -1.386294

    Reference: OmniISR, eq. 4, as a mean.
    """
    return batch.mean(_summary(z, axis)[1])


def both_terms(view: View, z: Tensor | Summary, weight: Tensor, bias: Tensor, axis: int = 1) -> tuple[Tensor, Tensor]:
    """``MI_m`` and ``NE_m`` of one feature, as :func:`information_term` and :func:`entropy_term` have them.

    Where the adapter reads pooled features, both need one summary.
    """
    if view.structure.task == "segmentation":
        return information_term(view, z, weight, bias, axis), entropy_term(z, view.batch, axis)
    means, entropies = _summary(z, axis)
    MI, NE = view.classifier_loss(means, weight, bias, entropies)
    return MI, NE


def _summary(z: Tensor | Summary, axis: int) -> Summary:
    return z if isinstance(z, tuple) else ops.channel_summary(z.movedim(axis, 1))
