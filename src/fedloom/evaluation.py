"""How clients' own models and the shared model do, and the numbers that a round reports."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fedloom import tree
from fedloom.tasks import Task
from fedloom.tasks.base import Metrics
from fedloom.types import Leaves
from fedloom.work import Reply

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
        sums = tree.add(sums, part) if sums else part
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
