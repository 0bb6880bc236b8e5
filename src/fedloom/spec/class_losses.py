"""Losses over classes that several methods share, for rows (one label each) and for pixels (a map of labels).

Logits are rows x classes, or rows x classes x height x width with labels rows x height x width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom import ops
from fedloom.spec.seen import Seen
from fedloom.spec.view import View
from fedloom.tasks.batch import Batch
from fedloom.tasks.builtin import IGNORE
from fedloom.tensors import Leaves

CLASSES = ("classification", "binary")


def received_leaves(seen: Seen, names: tuple[str, ...]) -> Leaves:
    """The received model; leaves that stay with the client are its own at the start of the round."""
    return {name: seen.base(name) if seen.specs[name].sent else seen.start[name] for name in names}


def teacher(view: View, seen: Seen, leaves: Leaves | None = None) -> View:
    """The received model, or that of other leaves, on the same batch: evaluation mode, no gradient."""
    given = received_leaves(seen, tuple(view.leaves)) if leaves is None else leaves
    return view.at(given, train=False, fixed=True)


def valid(batch: Batch, like: Tensor) -> Tensor:
    """1 where a label counts: every row, and every pixel that is not ignored."""
    return torch.ones_like(like) if batch.y.dim() == 1 else (batch.y != IGNORE).to(like.dtype)


def mean_over(values: Tensor, batch: Batch) -> Tensor:
    """Mean over rows, or over the valid pixels of the batch, of one value each."""
    if values.dim() == 1:
        return batch.mean(values)
    counted = valid(batch, values)
    return batch.sum((values * counted).flatten(1).sum(1)) / batch.sum(counted.flatten(1).sum(1)).clamp(min=1)


def spread(per_class: Tensor, logits: Tensor) -> Tensor:
    """One value per class in a shape that goes with logits."""
    return per_class.reshape(1, -1, *[1] * (logits.dim() - 2))


def true_class(batch: Batch, logits: Tensor) -> Tensor:
    """Where a logit belongs to the true class, in the shape of the logits."""
    return batch.y.unsqueeze(1) == spread(torch.arange(logits.shape[1], device=logits.device), logits)


def within(logits: Tensor, allowed: Tensor) -> Tensor:
    """Logits with the classes that are not allowed pushed out of every soft-max; allowed ones stay as they are."""
    return torch.where(allowed, logits, torch.finfo(logits.dtype).min)


def weighted_cross_entropy(logits: Tensor, batch: Batch, weight: Tensor | None = None) -> Tensor:
    """``mean_i weight[y_i] CE_i``: divided by the number of rows or valid pixels, not by the sum of weights."""
    y = batch.y.long()
    losses = ops.cross_entropies(logits, y, IGNORE)
    if weight is not None:
        losses = losses * weight[y.clamp(max=logits.shape[1] - 1)]
    return mean_over(losses, batch)


def divergence(student: Tensor, known: Tensor, allowed: Tensor, tau: float) -> Tensor:
    """``KL(softmax(known/tau) || softmax(student/tau))`` within the allowed classes, per row or pixel.

    Where no class is allowed it is 0, not NaN.
    """
    mine, theirs = (F.log_softmax(within(z / tau, allowed), 1) for z in (student, known))
    return (theirs.exp() * (theirs - mine)).sum(1)
