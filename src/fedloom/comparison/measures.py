"""What is measured of one cell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedloom.comparison.cell import Cell


@dataclass(frozen=True, kw_only=True, slots=True)
class Measures:
    """Numbers of one run; None where it has none.

    Args:
        value: the primary metric: mean over clients of their own models on their own test rows, at the end.
        best: its best round, chosen on validation rows where there are any.
        worst10: mean of the worst tenth of the clients.
        shared: the shared model on all test rows.
        new: clients that never took part, after adaptation.
        rounds: rounds played.
        bytes: sent up and down in all.
        seconds: training and aggregation.
        clients: the primary metric client by client.
    """

    value: float | None = None
    best: float | None = None
    worst10: float | None = None
    shared: float | None = None
    new: float | None = None
    rounds: int = 0
    bytes: int | None = None
    seconds: float | None = None
    clients: Mapping[str, float]


def measured(cell: Cell) -> Measures:
    """The numbers of a cell; of one that is not done only what its rounds tell."""
    history = cell.history
    if cell.state != "done":
        return Measures(
            rounds=len(history),
            bytes=sum((r.get("bytes_up") or 0) + (r.get("bytes_down") or 0) for r in history) if history else None,
            seconds=sum(r.get("seconds") or 0.0 for r in history) if history else None,
            clients={},
        )
    result, summary = cell.result, cell.result.summary()
    metric = result.task.primary
    clients = {n: v for n, c in result.clients.items() if not c.new and (v := c.metrics.get(metric)) is not None}
    return Measures(
        value=summary.mean,
        best=summary.best_mean,
        worst10=summary.worst_decile,
        shared=summary.shared,
        new=summary.new,
        rounds=summary.rounds,
        bytes=summary.bytes_up + summary.bytes_down,
        seconds=summary.seconds,
        clients=clients,
    )


def reached(
    history: Sequence[Mapping[str, Any]], metric: str, target: float, better: bool
) -> tuple[int, int, float] | None:
    """Round, bytes and seconds at which a curve first reaches a target; None if it never does.

    Example:
        >>> curve = [{"round": 1, "accuracy": 0.4, "bytes_up": 5, "bytes_down": 5, "seconds": 1.0},
        ...          {"round": 2, "accuracy": 0.6, "bytes_up": 5, "bytes_down": 5, "seconds": 1.0}]
        >>> reached(curve, "accuracy", 0.5, better=True)
        (2, 20, 2.0)
    """
    sent, spent = 0, 0.0
    for record in history:
        sent += (record.get("bytes_up") or 0) + (record.get("bytes_down") or 0)
        spent += record.get("seconds") or 0.0
        value = record.get(metric)
        if value is not None and (value >= target if better else value <= target):
            return int(record["round"]), sent, spent
    return None
