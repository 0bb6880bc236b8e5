"""How clients' own models and the shared model do, and the numbers that a round reports."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from fedloom import tensors
from fedloom.clients.messages import Reply
from fedloom.tasks import Task
from fedloom.tasks.base import Metrics
from fedloom.tensors import Leaves


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluate:
    """When and on whom models are tested.

    Args:
        every: rounds between evaluations; 0: only after the last round, which is always evaluated, on all clients.
        clients: all, sampled (those of the round), or a number (a fixed seeded choice); all up to 1,000 clients.
        moments: end (after the round), and for the clients of the round: before and after their local training.
        patience: stop when the validation metric has not improved for so many evaluations, and keep the model of the best round
            (`kept_round` of the last record); 0: never.
        holdout: as in [data], for federations made in Python.
        adapt_epochs: as in [data], for federations made in Python.
        folds: cross-validation: every client's rows are cut into so many parts, each tested once by a run of its own; 0: none.
            In Python it is `fl.cross_validate`.
        repeats: how often the rows are cut anew for it.
    """

    every: int = 1
    clients: Literal["all", "sampled"] | int | None = None
    moments: tuple[Literal["before", "after", "end"], ...] = ("end",)
    patience: int = 0
    holdout: float = 0.0
    adapt_epochs: int = 5
    folds: int = 0
    repeats: int = 1

    BOUNDS: ClassVar[tuple[str, ...]] = (
        "folds >= 0",
        "repeats >= 1",
        "every >= 0",
        "clients >= 1",
        "patience >= 0",
        "0 <= holdout < 1",
        "adapt_epochs >= 0",
    )


_POINT = 0.01


def own_metrics(
    task: Task, replies: Sequence[Reply], sizes: Mapping[str, int], name: str = "test"
) -> dict[str, Metrics]:
    """Metrics of each client's own model on its own rows, with ``n_test``."""
    found = {}
    for reply in replies:
        found[reply.id] = task.judge(*reply.judged[name]) | {"n_test": sizes[reply.id]}
    return found


def pooled_metrics(task: Task, replies: Sequence[Reply], name: str) -> Metrics:
    """Metrics of one model on everybody's rows together: sums are added, kept rows are joined."""
    sums: Leaves = {}
    kept: dict[str, list[torch.Tensor]] = {}
    for reply in replies:
        part, rows = reply.judged[name]
        sums = tensors.add(sums, part) if sums else part
        for key, value in rows.items():
            kept.setdefault(key, []).append(value)
    return task.judge(sums, {k: torch.cat(v) for k, v in kept.items()})


def summary(task: Task, clients: Mapping[str, Metrics]) -> Metrics:
    """Mean over clients of each metric, and of the primary one the spread, the worst tenth and the weighted mean."""
    record: Metrics = {}
    names = list(dict.fromkeys(k for m in clients.values() for k in m if k != "n_test"))
    for name in names:
        values = [v for m in clients.values() if (v := m.get(name)) is not None]
        record[name] = statistics.fmean(values) if values else None
    p = task.primary
    pairs = [(v, m["n_test"] or 0) for m in clients.values() if (v := m.get(p)) is not None]
    if not pairs:
        return record
    values = [v for v, _ in pairs]
    worst = sorted(values, reverse=not task.higher_is_better)[: math.ceil(len(values) / 10)]
    record[f"{p}_std"] = statistics.pstdev(values)
    record[f"{p}_worst10"] = statistics.fmean(worst)
    record[f"{p}_weighted"] = math.fsum(v * n for v, n in pairs) / max(math.fsum(n for _, n in pairs), 1)
    return record


def absent_note(task: Task, record: Mapping[str, Any]) -> str | None:
    """A sentence where clients that never took part move the mean by more than a point."""
    everyone, part = record.get(task.primary), record.get(f"{task.primary}_participants")
    if everyone is None or part is None:
        return None
    scale = 1.0 if task.higher_is_better else max(abs(everyone), 1e-12)
    if abs(everyone - part) <= _POINT * scale:
        return None
    return (
        f"clients that never took part change the mean: {task.primary} is {everyone:.4f} over all clients and "
        f"{part:.4f} over those that took part"
    )
