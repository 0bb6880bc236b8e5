"""What a method brings each client over training alone."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from fedloom.errors import UserError
from fedloom.runs.result import Result


@dataclass(frozen=True, slots=True)
class Gain:
    """Differences of the primary metric, client by client; positive is better, whatever the metric's direction.

    Args:
        clients: the gain of each client that has test rows in both runs.
        mean: their mean.
        median: their median.
        worst: the least of them.
        helped: share of the clients that gain.
        harmed: share of the clients that lose.
    """

    clients: dict[str, float]
    mean: float
    median: float
    worst: float
    helped: float
    harmed: float

    def __str__(self) -> str:
        return f"{self.mean:+.4f} (median {self.median:+.4f}; {self.helped:.0%} of {len(self.clients)} clients gain)"


def gain(result: Result, local_result: Result) -> Gain:
    """Gain of each client over local training: its metric in one run less its metric in the other.

    Args:
        result: a run.
        local_result: a run of ``fl.local()`` on the same clients.

    Raises:
        UserError: if the runs are of different clients or tasks.

    Example:
        >>> import fedloom as fl
        >>> data = fl.data.load("digits").partition(fl.dirichlet(0.3), clients=4, seed=0)
        >>> alone = fl.fit("local", fl.models.mlp, data, rounds=1, progress=False)
        >>> fl.gain(alone, alone).mean
        0.0
    """
    p = result.task.primary
    if p != local_result.task.primary or set(result.clients) != set(local_result.clients):
        raise UserError(
            "gain: the two runs are of different clients or metrics; run both on the same federation and task"
        )
    sign = 1.0 if result.task.higher_is_better else -1.0
    found: dict[str, float] = {}
    for name, client in result.clients.items():
        ours, theirs = client.metrics.get(p), local_result.clients[name].metrics.get(p)
        if ours is not None and theirs is not None:
            found[name] = sign * (ours - theirs)
    if not found:
        raise UserError("gain: no client has test rows in both runs")
    values = list(found.values())
    return Gain(
        clients=found,
        mean=statistics.fmean(values),
        median=statistics.median(values),
        worst=min(values),
        helped=sum(v > 0 for v in values) / len(values),
        harmed=sum(v < 0 for v in values) / len(values),
    )
