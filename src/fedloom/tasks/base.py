"""A task: the loss of an example, the statistics that are added up over a test set, and the metrics made of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedloom.ops import linear, operator
from fedloom.tasks.batch import Batch
from fedloom.tensors import Leaves

Metrics = dict[str, float | None]


@dataclass(frozen=True, slots=True)
class Task:
    """What is predicted and how it is judged.

    Args:
        loss: ``(output, y) -> one value per row`` (``reduction="none"``), so that padding rows can be left out.
        metrics: ``(outputs, targets) -> {name: number}`` on a whole test set; None for the loss alone.
        predict: ``output -> prediction`` for users; None returns the output.
        primary: the metric that summaries rank by.
        higher_is_better: its direction.
        name: how configuration files and methods call it.
        mean: ``(output, batch) -> scalar``; the batch's loss where it is not the mean of ``loss`` over rows.
        statistics: ``(output, batch) -> sums``; None keeps outputs and targets for ``metrics``.
        summarise: ``sums -> metrics``, for ``statistics``.
        classes: whether targets are classes.
        check: ``(outputs' width, targets) -> None``; raises where data and model do not fit.

    Example:
        >>> import torch
        >>> task = Task(lambda out, y: (out[:, 0] - y).abs(), primary="loss", higher_is_better=False)
        >>> batch = Batch(torch.zeros(2, 1), torch.tensor([1.0, 3.0]))
        >>> float(task.value(torch.zeros(2, 1), batch))
        2.0
    """

    loss: Callable[[Tensor, Tensor], Tensor]
    metrics: Callable[[Tensor, Tensor], Metrics] | None = None
    predict: Callable[[Tensor], Tensor] | None = None
    primary: str = "loss"
    higher_is_better: bool = False
    name: str = "custom"
    mean: Callable[[Tensor, Batch], Tensor] | None = None
    statistics: Callable[[Tensor, Batch], Leaves] | None = None
    summarise: Callable[[Leaves], Metrics] | None = None
    classes: bool = False
    check: Callable[[int, Tensor, str], None] | None = field(default=None, compare=False)

    def value(self, output: Tensor, batch: Batch) -> Tensor:
        """The batch's loss."""
        if self.mean is not None:
            return self.mean(output, batch)
        return batch.mean(self.loss(output, batch.y))

    def judge(self, sums: Leaves, kept: Leaves) -> Metrics:
        """Metrics of a whole test set, from added statistics or from kept outputs and targets."""
        if self.summarise is not None:
            return self.summarise(sums)
        loss = self.loss(kept["output"], kept["y"]).mean()
        found: Metrics = {"loss": float(loss)}
        if self.metrics is not None:
            found |= {k: None if v is None else float(v) for k, v in self.metrics(kept["output"], kept["y"]).items()}
        return found


@operator
def classifier_loss(
    task: Task, batch: Batch, u: Tensor, weight: Tensor, bias: Tensor, *values: Tensor
) -> tuple[Tensor, ...]:
    """Return the task's loss of a linear classifier on u, and the mean over the real rows of each further value.

    Args:
        task: the task.
        batch: the labels and the mask.
        u: (rows, channels).
        weight: (outputs, channels).
        bias: (outputs,).
        values: (rows,) each.
    """
    return task.value(linear(u, weight, bias), batch), *map(batch.mean, values)


def class_logits(output: Tensor) -> Tensor:
    """Logits over classes: a single logit z becomes (0, z)."""
    if output.dim() == 1:
        output = output[:, None]
    return torch.cat([torch.zeros_like(output), output], 1) if output.shape[1] == 1 else output
