"""What the cells say together: one row per method and setting, one per method over all settings, and the unification gap."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from fedloom.comparison.cell import Cell, Cells
from fedloom.comparison.grid import setting
from fedloom.comparison.measures import Measures, measured, reached
from fedloom.comparison.statistics import Interval, front, holm, interval, paired_t, ranks, sign_test, wilcoxon

Row = dict[str, Any]


class Verdicts:
    """Statistics of a comparison, as rows of plain values; None wherever there is nothing to say.

    Values are paired by setting and seed: within such a pair the methods saw the same partition, initial weights and cohorts.
    Differences are counted so that positive is better, whatever the metric's direction.

    Args:
        comparison: the comparison; cells that are not done take no part in any statistic, and are counted.
    """

    def __init__(self, comparison: Cells) -> None:
        self.of = comparison
        self.sign = 1.0 if comparison.higher_is_better else -1.0

    @cached_property
    def measures(self) -> dict[tuple[str, str, int], Measures]:
        """Numbers of every cell by setting, method and seed."""
        return {(c.setting, c.method, c.seed): measured(c) for c in self.of.cells}

    def values(self, method: str, where: str) -> dict[int, float]:
        """The metric of a method in a setting by seed."""
        found = {s: self.measures[where, method, s].value for s in self.of.seeds}
        return {s: v for s, v in found.items() if v is not None}

    def pairs(self, method: str, where: str) -> dict[int, float]:
        """Differences from the baseline by seed."""
        ours, theirs = self.values(method, where), self.values(self.of.baseline, where)
        return {s: self.sign * (ours[s] - theirs[s]) for s in ours if s in theirs}

    def client_pairs(self, method: str, where: str) -> list[tuple[int, str, float]]:
        """Differences from the baseline by seed and client."""
        found = []
        for seed in self.of.seeds:
            ours = self.measures[where, method, seed].clients
            theirs = self.measures[where, self.of.baseline, seed].clients
            found += [(seed, n, self.sign * (v - theirs[n])) for n, v in ours.items() if n in theirs]
        return found

    # Tables.

    def cells(self) -> Iterator[Row]:
        """One row per run."""
        for cell in self.of.cells:
            m = self.measures[cell.setting, cell.method, cell.seed]
            yield {
                "setting": cell.setting,
                **cell.options,
                "method": cell.method,
                "seed": cell.seed,
                "state": cell.state,
                **{k: getattr(m, k) for k in ("value", "best", "worst10", "shared", "new", "bytes", "seconds")},
                "rounds_played": m.rounds,
                "difference": self.pairs(cell.method, cell.setting).get(cell.seed),
                "folder": cell.path.name,
                "failure": cell.failure,
            }

    def clients(self) -> Iterator[Row]:
        """One row per run and client."""
        for cell in self.of.cells:
            ours = self.measures[cell.setting, cell.method, cell.seed].clients
            theirs = self.measures[cell.setting, self.of.baseline, cell.seed].clients
            for name, value in ours.items():
                yield {
                    "setting": cell.setting,
                    "method": cell.method,
                    "seed": cell.seed,
                    "client": name,
                    "value": value,
                    "difference": self.sign * (value - theirs[name]) if name in theirs else None,
                }

    @cached_property
    def summary(self) -> list[Row]:
        """One row per setting and method."""
        return [row for where in self.of.settings for row in self._setting(where)]

    def _setting(self, where: str) -> list[Row]:
        target = self.target(where)
        rows = []
        for method in self.of.methods:
            cells = self.of.of(method, where)
            mine = [self.measures[where, method, c.seed] for c in cells]
            there = [m for m, c in zip(mine, cells, strict=True) if c.state == "done"]
            row: Row = {"setting": where, **cells[0].options, "method": method, "baseline": method == self.of.baseline}
            row |= {"done": len(there), "runs": len(cells), "failed": sum(c.state == "failed" for c in cells)}
            row |= _spread("value", interval(list(self.values(method, where).values())))
            row |= self._against(method, where)
            for key in ("worst10", "shared", "new", "best", "bytes", "seconds"):
                row[key] = _mean([v for m in there if (v := getattr(m, key)) is not None])
            row["rounds_played"] = _mean([float(m.rounds) for m in there])
            row |= {"target": target} | self._to_target(target, [c for c in cells if c.state == "done"])
            rows.append(row)
        for row, p in zip(rows, holm([r["p"] for r in rows]), strict=True):
            row["p_holm"] = p
        self._rank(rows, [where])
        _pareto(rows, self.sign)
        return rows

    def _against(self, method: str, where: str) -> Row:
        if method == self.of.baseline:
            return _versus([], []) | {"difference": None}
        return _versus(list(self.pairs(method, where).values()), [d for _, _, d in self.client_pairs(method, where)])

    def target(self, where: str) -> float | None:
        """The value whose rounds and bytes are counted in a setting: the one asked for, or the baseline's mean."""
        return (
            self.of.target if self.of.target is not None else _mean(list(self.values(self.of.baseline, where).values()))
        )

    def _to_target(self, target: float | None, cells: Sequence[Cell]) -> Row:
        found = (
            []
            if target is None
            else [r for c in cells if (r := reached(c.history, self.of.metric, target, self.of.higher_is_better))]
        )
        return {
            "reached": len(found),
            "rounds_to_target": _mean([float(r[0]) for r in found]),
            "bytes_to_target": _mean([float(r[1]) for r in found]),
            "seconds_to_target": _mean([r[2] for r in found]),
        }

    def _rank(self, rows: Sequence[Row], settings: Sequence[str]) -> None:
        """Mean ranks over the pairs of setting and seed in which every method that has any value has one."""
        methods = [m for m in self.of.methods if any(self.values(m, s) for s in settings)]
        blocks = []
        for where in settings:
            values = {m: self.values(m, where) for m in methods}
            for seed in self.of.seeds:
                if all(seed in v for v in values.values()):
                    blocks.append(ranks([-self.sign * values[m][seed] for m in methods]))
        for row in rows:
            known = row["method"] in methods and blocks
            row["rank"] = _mean([b[methods.index(row["method"])] for b in blocks]) if known else None
            row["ranked"] = len(blocks) if known else 0

    @cached_property
    def overall(self) -> list[Row]:
        """One row per method over all settings and seeds."""
        rows = []
        for method in self.of.methods:
            row: Row = {"method": method, "baseline": method == self.of.baseline}
            cells = self.of.of(method)
            row |= {"done": sum(c.state == "done" for c in cells), "runs": len(cells)}
            row["failed"] = sum(c.state == "failed" for c in cells)
            each = [v for where in self.of.settings for v in self.values(method, where).values()]
            row |= _spread("value", interval(each))
            other = method != self.of.baseline
            pairs = [d for w in self.of.settings for d in self.pairs(method, w).values()] if other else []
            people = [d for w in self.of.settings for _, _, d in self.client_pairs(method, w)] if other else []
            row |= _versus(pairs, people)
            row |= {"p_wilcoxon": wilcoxon(pairs), "p_sign": sign_test(row["wins"], row["losses"])}
            rows.append(row)
        for row, p in zip(rows, holm([r["p"] for r in rows]), strict=True):
            row["p_holm"] = p
        self._rank(rows, self.of.settings)
        return rows

    @cached_property
    def gaps(self) -> list[Row]:
        """The unification gap: what centralised training is better by, where ``mode`` is swept.

        One row per setting (without the mode), method and mode: the difference by seed, and how much of the baseline's gap the
        method closes.
        """
        modes = [m for m in self.of.sweep.get("mode", ()) if m != "centralised"]
        if len(modes) == len(self.of.sweep.get("mode", ())):
            return []
        rows = []
        rest = [k for k in self.of.sweep if k != "mode"]
        for options in {setting({k: c.options[k] for k in rest}): c.options for c in self.of.cells}.values():
            for mode in modes:
                base = self._gap(self.of.baseline, options, mode)
                for method in self.of.methods:
                    gap = self._gap(method, options, mode)
                    closed = [base[s] - g for s, g in gap.items() if s in base] if method != self.of.baseline else []
                    row: Row = {"setting": setting({k: options[k] for k in rest}), "mode": mode, "method": method}
                    row |= _spread("gap", interval(list(gap.values()))) | _spread("closed", interval(closed))
                    rows.append(row | {"p": paired_t(closed)})
        return rows

    def _gap(self, method: str, options: Mapping[str, Any], mode: str) -> dict[int, float]:
        pooled = self.values(method, setting({**options, "mode": "centralised"}))
        apart = self.values(method, setting({**options, "mode": mode}))
        return {s: self.sign * (v - apart[s]) for s, v in pooled.items() if s in apart}


def _spread(name: str, found: Interval | None) -> Row:
    """A mean and its interval as columns."""
    if found is None:
        return {name: None, f"{name}_low": None, f"{name}_high": None, f"{name}_std": None, f"{name}_n": 0}
    low, high = (None, None) if found.half is None else (found.mean - found.half, found.mean + found.half)
    return {
        name: found.mean,
        f"{name}_low": low,
        f"{name}_high": high,
        f"{name}_std": found.std,
        f"{name}_n": found.n,
    }


def _versus(pairs: Sequence[float], clients: Sequence[float]) -> Row:
    """Differences from the baseline as columns."""
    return {
        **_spread("difference", interval(pairs)),
        "p": paired_t(pairs),
        "wins": sum(d > 0 for d in pairs),
        "losses": sum(d < 0 for d in pairs),
        "ties": sum(d == 0 for d in pairs),
        "clients_better": sum(d > 0 for d in clients),
        "clients_worse": sum(d < 0 for d in clients),
        "clients_equal": sum(d == 0 for d in clients),
    }


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _pareto(rows: Sequence[Row], sign: float) -> None:
    """Marks the methods that none beats in metric, bytes and seconds at once."""
    known = [r for r in rows if None not in (r["value"], r["bytes"], r["seconds"])]
    marks = front([(sign * r["value"], -r["bytes"], -r["seconds"]) for r in known])
    for row in rows:
        row["pareto"] = None
    for row, mark in zip(known, marks, strict=True):
        row["pareto"] = mark
