"""The runs of a report, put in order: series over seeds, the baseline, clients that can be compared."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fedloom.comparison.record import Comparison
from fedloom.reports.read_runs import RunData
from fedloom.runs.run_folder import flat

HUES = 8
"""Colours for series; after them lines are dashed."""

CLASSES = 10
"""Colours for classes, which also bear their names."""

# What may differ between the runs of one series: their seed, and how and where they were computed.
_ASIDE = (
    "seed",
    "data.seed",
    "data.fingerprint",
    "repeatable",
    "engine",
    "device",
    "workers",
    "deterministic",
    "method",
)
_ASIDE_TABLES = ("resolved.", "evaluate.", "model.leaves.", "model.sha256")


@dataclass(eq=False)
class Series:
    """The runs of one method in one setting, which differ by their seeds.

    Args:
        label: what it is called.
        runs: its runs.
        index: its place among the series.
        hue: its colour; -1 for local training, which is grey.
    """

    label: str
    runs: list[RunData]
    index: int = 0
    hue: int = 0

    @property
    def css(self) -> str:
        """Its classes in the style sheet."""
        if self.hue < 0:
            return "s local"
        return f"s s{self.hue % HUES}" + (f" d{self.hue // HUES % 3}" if self.hue >= HUES else "")

    @property
    def local(self) -> bool:
        """Whether clients train alone."""
        return self.runs[0].config.get("method", "").startswith("local(") and self.runs[0].mode == "federated"

    @cached_property
    def finals(self) -> list[float]:
        """The metric's mean over clients at the end of each run."""
        return [float(r.last[r.primary]) for r in self.runs if r.last]

    @property
    def mean(self) -> float | None:
        """Over the runs."""
        return statistics.fmean(self.finals) if self.finals else None

    def over(self, key: str) -> float | None:
        """The mean over runs of a number of the last evaluation."""
        values = [float(v) for r in self.runs if isinstance(v := r.last.get(key), (int, float))]
        return statistics.fmean(values) if values else None

    def total(self, key: str) -> float:
        """The mean over runs of a number summed over rounds."""
        return statistics.fmean(r.total(key) for r in self.runs)


@dataclass(eq=False)
class Book:
    """All that a report is made from.

    Args:
        runs: the runs.
        comparisons: the comparisons among what was given.
        notes: what could not be read.
        title: of the page.
        tsne: whether rows are also drawn by t-SNE, which takes a few seconds.
    """

    runs: list[RunData]
    comparisons: list[Comparison] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    title: str = ""
    tsne: bool = True

    @property
    def metric(self) -> str:
        """The metric that counts."""
        return self.runs[0].primary

    @property
    def sign(self) -> float:
        """1 where more is better, -1 where less is."""
        return self.runs[0].sign

    @cached_property
    def series(self) -> list[Series]:
        """The runs in groups, in the order in which they were given."""
        groups: dict[tuple[Any, ...], list[RunData]] = {}
        for run in self.runs:
            groups.setdefault((run.method, run.setting, run.mode, *_settings(run)), []).append(run)
        keys = list(groups)
        made = [Series(label, list(groups[k]), i) for i, (k, label) in enumerate(zip(keys, labels(keys), strict=True))]
        hue = 0
        for series in made:
            series.hue = -1 if series.local else hue
            hue += not series.local
        return made

    @cached_property
    def local(self) -> Series | None:
        """Training alone, where it is among the runs."""
        return next((s for s in self.series if s.local), None)

    @cached_property
    def ranked(self) -> list[Series]:
        """The series that have a result, the best first."""
        there = [(s.mean * self.sign, -s.index, s) for s in self.series if s.mean is not None]
        return [s for _, _, s in sorted(there, key=lambda t: t[:2], reverse=True)]

    def alone(self, run: RunData) -> RunData | None:
        """The run of local training on the same rows, of the same seed where there is one."""
        found = [r for s in self.series if s.local for r in s.runs if r.data == run.data and r is not run]
        found.sort(key=lambda r: r.seed != run.seed)
        return found[0] if found else None

    def gains(self, series: Series) -> dict[str, float]:
        """What each client gains over training alone, by client (and seed, where the clients differ by it)."""
        found: dict[str, list[float]] = {}
        for run in series.runs:
            alone = self.alone(run)
            if alone is None or series.local:
                continue
            for client, value in run.values.items():
                if client in alone.values:
                    found.setdefault(self.named(run, client), []).append(self.sign * (value - alone.values[client]))
        return {k: statistics.fmean(v) for k, v in found.items()}

    @cached_property
    def populations(self) -> int:
        """How many different federations the runs are of."""
        return len(set(self.federations.values()))

    def of_clients(self, series: Series) -> dict[str, list[float]]:
        """The metric of each client at the end, over seeds where the clients are the same."""
        found: dict[str, list[float]] = {}
        for run in series.runs:
            for client, value in run.values.items():
                found.setdefault(self.named(run, client), []).append(value)
        return found

    def named(self, run: RunData, client: str) -> str:
        """A client's name, with what tells its federation from others where the runs are of several."""
        tag = self.federations[run.data]
        return f"{client} ({tag})" if tag else client

    @cached_property
    def federations(self) -> dict[str, str]:
        """The different federations of the runs, each with what tells it from the others: ``alpha=0.1, seed=1``."""
        tables: dict[str, dict[str, Any]] = {}
        for run in self.runs:
            tables.setdefault(run.data, flat(run.config.get("data", {})))
        keys = dict.fromkeys(k for t in tables.values() for k in t)
        told = [k for k in keys if len({str(t.get(k)) for t in tables.values()}) > 1]
        if all(_natural(t) for t in tables.values()):  # a hospital is the same whichever way its rows are cut
            told = [k for k in told if k != "seed"]
        found = {}
        for place, (text, table) in enumerate(tables.items()):
            tag = ", ".join(f"{k}={table[k]}" for k in told if k in table and k != "fingerprint")
            found[text] = tag[:60] or (f"data {place + 1}" if told else "")
        return found


def _natural(table: dict[str, Any]) -> bool:
    """Whether a client is someone, rather than a share of dealt rows."""
    return str(table.get("partition", "")).startswith("natural") or "path" in table


def _settings(run: RunData) -> tuple[tuple[str, str], ...]:
    """What makes a run's series, as sorted pairs."""
    found = flat(run.config)
    return tuple((k, str(v)) for k, v in sorted(found.items()) if k not in _ASIDE and not k.startswith(_ASIDE_TABLES))


def labels(keys: Sequence[tuple[Any, ...]]) -> list[str]:
    """A label for each group: its method, its mode unless federated, and what tells it from others of the same method.

    Example:
        >>> labels([("fedavg", "", "federated", ("rounds", "5")), ("fedavg", "", "federated", ("rounds", "9"))])
        ['fedavg · rounds=5', 'fedavg · rounds=9']
    """
    plain = [" · ".join(filter(None, (k[0], k[1], "" if k[2] == "federated" else k[2]))) for k in keys]
    made = []
    for key, label in zip(keys, plain, strict=True):
        mine = dict(key[3:])
        twins = [dict(k[3:]) for k, other in zip(keys, plain, strict=True) if other == label and k != key]
        told = [
            k for k in sorted({n for t in [mine, *twins] for n in t}) if any(t.get(k) != mine.get(k) for t in twins)
        ]
        parts = [f"{k.split('.')[-1]}={mine.get(k, '–')}" for k in told]
        made.append(" · ".join([label, ", ".join(parts)]) if parts else label)
    return made
