"""The results of a deployment as a table: every site's own model on its own test rows, with intervals over seeds."""

from __future__ import annotations

import csv
import re
import statistics
from pathlib import Path
from typing import Any

from fedloom.comparison.statistics import interval
from fedloom.errors import UserError
from fedloom.flower.experiment import Experiment
from fedloom.flower.server.records import read_experiment
from fedloom.flower.site.site_store import folder_name


def read(out: Path) -> dict[str, Any]:
    """Metrics by method and site, a list over seeds."""
    try:
        plan = Experiment.parse((out / "experiment.toml").read_text(encoding="utf-8"))
    except OSError:
        raise UserError(f"{out} holds no experiment") from None
    read_experiment(out)
    found: dict[str, Any] = {}
    for key, (method, _) in plan.runs().items():
        path = out / folder_name(key) / "clients.csv"
        if not path.exists():
            raise UserError(f"{path} is missing: the experiment is not finished; go on with --resume")
        with open(path, newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                site = found.setdefault(method, {}).setdefault(row.pop("client"), {})
                for name, value in row.items():
                    site.setdefault(name, []).append(float(value) if value else None)
    return found


def text(found: dict[str, Any], metrics: tuple[str, ...] = ("auc", "balanced_accuracy", "accuracy", "loss")) -> str:
    """A table for each metric that there is: two at most, the most telling first."""
    sites = list(next(iter(found.values())))
    there = [m for m in metrics if any(m in found[k][s] for k in found for s in sites)][:2]
    blocks = []
    for metric in there:
        lines = [_line(metric, [*sites, "mean"])]
        for method in found:
            cells, means = [], []
            for site in sites:
                values = [v for v in found[method][site].get(metric, []) if v is not None]
                cells.append(_cell(values))
                means += [statistics.fmean(values)] if values else []
            lines.append(_line(method, [*cells, f"{statistics.fmean(means):.3f}" if means else "-"]))
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _cell(values: list[float]) -> str:
    found = interval(values)
    if found is None:
        return "-"
    return f"{found.mean:.3f}" if found.half is None else f"{found.mean:.3f} ± {found.half:.3f}"


def _line(first: str, cells: list[str]) -> str:
    return re.sub(r"\s+$", "", f"{first:<24}" + "".join(f"{cell:>18}" for cell in cells))
