"""Cross-validation at every client, for small sites: one number per client from all of its rows, with an interval."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedloom import api
from fedloom.data import ClientData, Federation, Rows, concatenate
from fedloom.errors import UserError
from fedloom.rng import stream
from fedloom.runs import config_file
from fedloom.runs.result import Result
from fedloom.store import atomic

FILE = "folds.json"


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over folds and its 95 % interval.

    Args:
        mean: over the folds.
        low: lower end of the interval; None with one fold.
        high: upper end.
        folds: number of folds with a value.
    """

    mean: float
    low: float | None
    high: float | None
    folds: int

    def __str__(self) -> str:
        return f"{self.mean:.4f}" if self.low is None else f"{self.mean:.4f} ({self.low:.4f} to {self.high:.4f})"


@dataclass(frozen=True, slots=True)
class CrossValidation:
    """The primary metric of every client over all folds.

    Args:
        metric: the primary metric.
        overall: the mean over clients.
        clients: each client's own.
        results: the runs, repeat by repeat, fold by fold.
    """

    metric: str
    overall: Estimate
    clients: dict[str, Estimate]
    results: tuple[Result, ...]

    def __str__(self) -> str:
        lines = [f"{self.metric}, mean over clients: {self.overall}"]
        return "\n".join(lines + [f"  client {name}: {value}" for name, value in self.clients.items()])

    def record(self) -> dict[str, Any]:
        """As plain values: what ``folds.json`` holds."""
        return {
            "metric": self.metric,
            "runs": len(self.results),
            "overall": asdict(self.overall),
            "clients": {name: asdict(value) for name, value in self.clients.items()},
        }


def cross_validate(
    method: Any,
    model: Any,
    data: Any,
    *,
    folds: int = 5,
    repeats: int = 1,
    seed: int = 0,
    out: str | Path | None = None,
    **options: Any,
) -> CrossValidation:
    """Runs a method once per fold; in each, every client tests on another part of its rows.

    A client's training, validation and test rows are pooled and cut into folds, stratified by class where there are classes. The
    interval is Student's with the variance of overlapping training sets corrected by Nadeau and Bengio:
    ``s^2 (1/J + 1/(folds - 1))`` for J = folds x repeats.

    Args:
        method: as for ``fit``.
        model: as for ``fit``.
        data: as for ``fit``.
        folds: parts of each client's rows.
        repeats: how often the rows are cut anew.
        seed: of the cuts and of the runs.
        out: folder for the runs, one folder each, and for the numbers (``folds.json``).
        **options: options of ``fit``.

    Reference: Nadeau and Bengio, Inference for the generalization error, Machine Learning 52 (2003).

    Example:
        >>> import fedloom as fl
        >>> made = fl.cross_validate("fedavg", "mlp", {"name": "digits", "clients": 3}, folds=3, rounds=1, progress=False)
        >>> len(made.results), made.overall.folds, len(made.clients)
        (3, 3, 3)
    """
    for name, value, least in (("folds", folds, 2), ("repeats", repeats, 1)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise UserError(f"{name}={value!r}: expected a whole number of at least {least}")
    federation, table = config_file.federation_of(data, seed)
    judging = {k: v for k, v in (options.pop("evaluate", None) or {}).items() if k not in ("folds", "repeats")}
    judging |= {k: table[k] for k in ("holdout", "adapt_epochs") if k in table}
    results = []
    for repeat in range(1, repeats + 1):
        for fold in range(1, folds + 1):
            part = folded(federation, folds, fold - 1, seed, repeat)
            place = None if out is None else Path(out) / f"repeat-{repeat}-fold-{fold}"
            results.append(api.fit(method, model, part, seed=seed, out=place, evaluate=judging, **options))
    metric = results[0].task.primary
    names = list(results[0].clients)
    values = {n: [v for r in results if (v := r.clients[n].metrics.get(metric)) is not None] for n in names}
    means = [v for r in results if (v := r.summary().mean) is not None]
    if not means:
        raise UserError("cross_validate: no client has enough rows to be tested")
    found = CrossValidation(
        metric, estimate(means, folds), {n: estimate(v, folds) for n, v in values.items() if v}, tuple(results)
    )
    if out is not None:
        atomic.write(Path(out) / FILE, json.dumps(found.record(), indent=2).encode())
    return found


def folded(data: Federation, folds: int, fold: int, seed: int, repeat: int) -> Federation:
    """The federation in which every client tests on one fold of its rows and trains on the others."""
    clients = []
    for client in data:
        rows = concatenate(list(client.parts().values()))
        tested = assignment(rows, folds, stream(seed, "split", "folds", client.id, repeat)) == fold
        train, test = (torch.from_numpy(np.flatnonzero(mask)) for mask in (~tested, tested))
        if not len(train):
            train, test = test, train
        clients.append(ClientData(client.id, rows.take(train), rows.take(test) if len(test) else None))
    return replace(data, clients=tuple(clients), origin={})


def assignment(rows: Rows, folds: int, generator: np.random.Generator) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The fold of each row: rows are dealt in turn, class after class, in random order."""
    y = rows.y
    labels = y.numpy() if y.dim() == 1 and not y.is_floating_point() else np.zeros(len(rows), np.int64)
    order = generator.permutation(len(rows))
    order = order[np.argsort(labels[order], kind="stable")]
    dealt = np.empty(len(rows), np.int64)
    dealt[order] = (np.arange(len(rows)) + generator.integers(folds)) % folds
    return dealt


def estimate(values: Sequence[float], folds: int, level: float = 0.95) -> Estimate:
    """Mean and interval of values over folds."""
    count, mean = len(values), statistics.fmean(values)
    if count < 2:
        return Estimate(mean, None, None, count)
    spread = math.sqrt(statistics.variance(values) * (1 / count + 1 / (folds - 1)))
    half = t_quantile((1 + level) / 2, count - 1) * spread
    return Estimate(mean, mean - half, mean + half, count)


def t_quantile(p: float, freedom: int) -> float:
    """Quantile of Student's distribution, for p above one half: bisection on Simpson's integral of the density.

    Example:
        >>> round(t_quantile(0.975, 4), 3), round(t_quantile(0.975, 1), 2)
        (2.776, 12.71)
    """
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)

    def above_zero(x: float) -> float:
        # The substitution t = sqrt(v) tan(u) makes the integrand a power of a cosine on a bounded interval.
        u = np.linspace(0.0, math.atan(x / math.sqrt(freedom)), 513)
        f = scale * math.sqrt(freedom) * np.cos(u) ** (freedom - 1)
        return float((u[1] - u[0]) / 3 * (f[0] + f[-1] + 4 * f[1:-1:2].sum() + 2 * f[2:-1:2].sum()))

    low, high = 0.0, 1e6
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if above_zero(middle) < p - 0.5 else (low, middle)
    return (low + high) / 2
