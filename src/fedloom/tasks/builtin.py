"""The named tasks: classification, binary, regression, segmentation."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.errors import UnknownName, UserError
from fedloom.ops import cross_entropies, operator
from fedloom.tasks.base import Metrics, Task
from fedloom.tasks.batch import Batch
from fedloom.tensors import Leaves

IGNORE = 255


def _confusion(predicted: Tensor, y: Tensor, weight: Tensor | None, classes: int) -> Tensor:
    """Counts, true class by predicted class (a product of indicators: it can be mapped over clients)."""
    kinds = torch.arange(classes, device=y.device)
    true = (y[:, None] == kinds).to(torch.float64)
    if weight is not None:
        true = true * weight.to(torch.float64)[:, None]
    return true.T @ (predicted[:, None] == kinds).to(torch.float64)


def per_class(confusion: Tensor) -> dict[str, Tensor]:
    """Precision, recall, F1 and IoU per class; NaN for classes in neither labels nor predictions."""
    confusion = confusion.double()
    hit, true, said = confusion.diagonal(), confusion.sum(1), confusion.sum(0)
    present = (true + said) > 0
    scores = {
        "precision": hit / said.clamp(min=1),
        "recall": hit / true.clamp(min=1),
        "f1": 2 * hit / (true + said).clamp(min=1),
        "iou": hit / (true + said - hit).clamp(min=1),
    }
    return {k: torch.where(present, v, torch.nan) for k, v in scores.items()}


# Classification -------------------------------------------------------------------------------------------


@operator
def mean_cross_entropy(output: Tensor, batch: Batch) -> Tensor:
    """Return the mean over the real rows of ``-log p_y``."""
    return F.cross_entropy(output, batch.y) if batch.mask is None else batch.mean(cross_entropies(output, batch.y))


def _ce_statistics(output: Tensor, batch: Batch) -> Leaves:
    losses = cross_entropies(output, batch.y)
    return {
        "loss": batch.sum(losses.double()),
        "confusion": _confusion(output.argmax(1), batch.y, batch.mask, output.shape[1]),
    }


def _ce_metrics(sums: Leaves) -> Metrics:
    confusion = sums["confusion"]
    n = float(confusion.sum())
    scores = per_class(confusion)
    held = confusion.sum(1) > 0
    return {
        "loss": float(sums["loss"]) / n,
        "accuracy": float(confusion.diagonal().sum()) / n,
        "balanced_accuracy": float(scores["recall"][held].mean()),
        "f1": float(scores["f1"].nanmean()),
    }


def _check_classes(width: int, y: Tensor, who: str) -> None:
    if width == 1:
        raise UserError(
            f"the model has one output; task 'classification' needs one per class: use task='binary' ({who})"
        )
    if y.is_floating_point():
        raise UserError(f"{who}: labels are {y.dtype}; classification needs integers (task='regression' takes numbers)")
    low, high = int(y.min()), int(y.max())
    if low < 0 or high >= width:
        raise UserError(f"{who}: labels go from {low} to {high}, but the model has {width} outputs (0 to {width - 1})")


# Binary ---------------------------------------------------------------------------------------------------


def _one_logit(output: Tensor) -> Tensor:
    return output.reshape(output.shape[0])


def _bce(output: Tensor, y: Tensor) -> Tensor:
    z = _one_logit(output)
    return F.binary_cross_entropy_with_logits(z, y.to(z.dtype), reduction="none")


def _bce_metrics(output: Tensor, y: Tensor) -> Metrics:
    score, truth = _one_logit(output).double(), y.bool()
    said, p = score > 0, torch.sigmoid(score)
    positive, negative = int(truth.sum()), int((~truth).sum())
    recall = float(said[truth].double().mean()) if positive else None
    rejection = float((~said[~truth]).double().mean()) if negative else None
    rates = [r for r in (recall, rejection) if r is not None]
    return {
        "accuracy": float((said == truth).double().mean()),
        "balanced_accuracy": sum(rates) / len(rates),
        "f1": float(per_class(_confusion(said.long(), truth.long(), None, 2))["f1"].nanmean()),
        "auc": _auroc(score, truth) if positive and negative else None,
        "auprc": _auprc(score, truth) if positive and negative else None,
        "brier": float(((p - truth.double()) ** 2).mean()),
        "sensitivity": recall,
        "specificity": rejection,
    }


def _auroc(score: Tensor, truth: Tensor) -> float:
    """Probability that a positive scores above a negative, ties counting half (Mann-Whitney)."""
    ordered = torch.sort(score[~truth])[0]
    below = torch.searchsorted(ordered, score[truth], right=False).double()
    through = torch.searchsorted(ordered, score[truth], right=True).double()
    return float(((below + through) / 2).mean() / len(ordered))


def _auprc(score: Tensor, truth: Tensor) -> float:
    """Average precision: precision at each distinct threshold, weighted by the gain in recall."""
    ordered, index = torch.sort(score, descending=True, stable=True)
    hits = truth[index].double().cumsum(0)
    last = torch.ones_like(ordered, dtype=torch.bool)
    last[:-1] = ordered[1:] != ordered[:-1]
    rank = torch.arange(1, len(ordered) + 1, dtype=torch.float64)
    hits, rank = hits[last], rank.to(hits.device)[last]
    gained = torch.diff(hits, prepend=hits.new_zeros(1))
    return float((hits / rank * gained).sum() / hits[-1])


def _check_binary(width: int, y: Tensor, who: str) -> None:
    if width != 1:
        raise UserError(
            f"the model has {width} outputs; task 'binary' needs one logit: use task='classification' ({who})"
        )
    wrong = (y != 0) & (y != 1)
    if bool(wrong.any()):
        raise UserError(f"{who}: label {y[wrong][0].item()!r}; task 'binary' needs 0 or 1")


# Regression -----------------------------------------------------------------------------------------------


def _squared(output: Tensor, y: Tensor) -> Tensor:
    y = y.to(output.dtype).reshape(output.shape)
    return ((output - y) ** 2).reshape(output.shape[0], -1).mean(1)


def _regression_metrics(output: Tensor, y: Tensor) -> Metrics:
    output = output.double()
    y = y.double().reshape(output.shape)
    spread = float(((y - y.mean(0)) ** 2).sum())
    error = float(((output - y) ** 2).sum())
    return {
        "mse": float(((output - y) ** 2).mean()),
        "mae": float((output - y).abs().mean()),
        "r2": 1 - error / spread if spread > 0 else None,
    }


def _check_numbers(width: int, y: Tensor, who: str) -> None:
    wide = 1 if y.dim() == 1 else y.shape[1]
    if wide != width:
        raise UserError(f"{who}: targets have width {wide}, the model's output {width}")


# Segmentation ---------------------------------------------------------------------------------------------


def _pixel_weights(y: Tensor, weights: Sequence[float] | None, dtype: torch.dtype) -> Tensor:
    """The weight of each pixel: 0 where it is ignored, else its class's, or 1."""
    valid = (y != IGNORE).to(dtype)
    if weights is None:
        return valid
    table = torch.tensor(list(weights), dtype=dtype, device=y.device)
    return valid * table[torch.where(y == IGNORE, 0, y)]


def _pixel_losses(output: Tensor, y: Tensor, weights: Sequence[float] | None) -> tuple[Tensor, Tensor]:
    """Weighted losses and weights of each row, summed over its pixels."""
    losses = cross_entropies(output, y, IGNORE)
    weight = _pixel_weights(y, weights, losses.dtype)
    losses = losses if weights is None else losses * weight
    return losses.flatten(1).sum(1), weight.flatten(1).sum(1)


def _pixel_metrics(sums: Leaves) -> Metrics:
    confusion = sums["confusion"]
    n = max(float(confusion.sum()), 1.0)
    scores = per_class(confusion)
    return {
        "loss": float(sums["loss"]) / max(float(sums["weight"]), 1e-300),
        "miou": float(scores["iou"].nanmean()),
        "mf1": float(scores["f1"].nanmean()),
        "mprecision": float(scores["precision"].nanmean()),
        "mrecall": float(scores["recall"].nanmean()),
        "pixel_accuracy": float(confusion.diagonal().sum()) / n,
    }


def segmentation(weights: Sequence[float] | None = None) -> Task:
    """A class for every pixel: cross-entropy over the pixels that are not void (255), and one confusion matrix.

    The loss is ``sum_i w(y_i) CE_i / sum_i w(y_i)`` over the valid pixels of a batch, as ``torch.nn.CrossEntropyLoss`` has it.
    Metrics are never weighted: IoU, F1, precision and recall per class from one confusion matrix over a whole test set, and
    their means over the classes that occur in labels or predictions.

    Args:
        weights: one weight per class; None for equal ones.

    Example:
        >>> task = segmentation(weights=[1.0, 3.0])
        >>> logits, y = torch.zeros(1, 2, 1, 3), torch.tensor([[[0, 1, 255]]])
        >>> f"{float(task.value(logits, Batch(logits, y))):.6f}"
        '0.693147'
    """
    if weights is not None:
        weights = tuple(float(w) for w in weights)
        if not all(math.isfinite(w) and w >= 0 for w in weights) or not any(weights):
            raise UserError(f"segmentation: weights={weights}; expected numbers of at least 0, not all of them 0")

    def loss(output: Tensor, y: Tensor) -> Tensor:
        total, weight = _pixel_losses(output, y, weights)
        return total / torch.where(weight > 0, weight, 1)

    def mean(output: Tensor, batch: Batch) -> Tensor:
        total, weight = _pixel_losses(output, batch.y, weights)
        whole = batch.sum(weight)
        return batch.sum(total) / torch.where(whole > 0, whole, 1)

    def statistics(output: Tensor, batch: Batch) -> Leaves:
        total, weight = _pixel_losses(output, batch.y, weights)
        rows = torch.ones(batch.y.shape[0], device=batch.y.device) if batch.mask is None else batch.mask
        counted = (batch.y != IGNORE) * rows.reshape(-1, 1, 1)
        said = output.argmax(1).flatten()
        return {
            "loss": batch.sum(total.double()),
            "weight": batch.sum(weight.double()),
            "confusion": _confusion(said, batch.y.flatten(), counted.flatten(), output.shape[1]),
        }

    def check(width: int, y: Tensor, who: str) -> None:
        if weights is not None and len(weights) != width:
            raise UserError(f"segmentation: {len(weights)} weights, but the model has {width} outputs; give one each")
        _check_pixels(width, y, who)

    return Task(
        loss,
        predict=lambda out: out.argmax(1),
        primary="miou",
        higher_is_better=True,
        name="segmentation",
        mean=mean,
        statistics=statistics,
        summarise=_pixel_metrics,
        classes=True,
        check=check,
    )


def _check_pixels(width: int, y: Tensor, who: str) -> None:
    if y.dim() != 3:
        raise UserError(f"{who}: targets have shape {tuple(y.shape)}; segmentation needs (n, height, width)")
    high = int(torch.where(y == IGNORE, 0, y).max())
    if high >= width:
        raise UserError(f"{who}: labels go up to {high}, but the model has {width} outputs ({IGNORE} is ignored)")


TASKS: dict[str, Task] = {
    "classification": Task(
        cross_entropies,
        predict=lambda out: out.argmax(1),
        primary="accuracy",
        higher_is_better=True,
        name="classification",
        mean=mean_cross_entropy,
        statistics=_ce_statistics,
        summarise=_ce_metrics,
        classes=True,
        check=_check_classes,
    ),
    "binary": Task(
        _bce,
        metrics=_bce_metrics,
        predict=lambda out: (_one_logit(out) > 0).long(),
        primary="accuracy",
        higher_is_better=True,
        name="binary",
        classes=True,
        check=_check_binary,
    ),
    "regression": Task(_squared, metrics=_regression_metrics, primary="mse", name="regression", check=_check_numbers),
    "segmentation": segmentation(),
}


def named(task: str | Task) -> Task:
    """Return the task of a name, or the task itself."""
    if isinstance(task, Task):
        return task
    if not isinstance(task, str):
        raise UserError(f"task={task!r} is neither a name nor an fl.Task; names are {', '.join(sorted(TASKS))}")
    if task not in TASKS:
        raise UnknownName("task", task, TASKS)
    return TASKS[task]
