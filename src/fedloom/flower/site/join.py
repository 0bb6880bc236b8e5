"""Before a site joins: its rows are read and checked, and what would leave is listed."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import tomli_w

from fedloom.errors import UserError
from fedloom.flower import programs as named
from fedloom.flower.apps import workshop
from fedloom.flower.error_codes import Refusal
from fedloom.flower.experiment import Experiment, digest
from fedloom.flower.site.site_data import SiteConfig


def set_path(config: Path, data: Path) -> None:
    """Writes into a site's file where its rows are."""
    try:
        table = tomllib.loads(config.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"cannot read the site's configuration {config}: {error}") from None
    if not data.exists():
        raise UserError(f"--data {data} does not exist")
    table["data"] = {**table.get("data", {}), "path": str(data.resolve())}
    config.write_text(tomli_w.dumps(table), encoding="utf-8")


def inspect(config: SiteConfig, experiment: Path) -> dict[str, Any]:
    """What a site has and, for each method, every tensor that would leave it, from the method's declaration."""
    plan, text = Experiment.load(experiment)
    try:
        shop = workshop(config, text)
    except Refusal as refusal:
        raise UserError(refusal.reason) from None
    runs = {}
    for key, bench in shop.benches.items():
        tensors = []
        for program in (named.SETUP, named.ROUND):
            if getattr(bench.bounds[0].method.schedule, program):
                lines = named.manifest(bench.declared(0, program))
                tensors += [{"when": "once" if program == named.SETUP else "every round", **line} for line in lines]
        kept = [n for n, s in bench.bounds[0].specs.items() if s.kept]
        runs[key] = {"leaves_site": tensors, "stays": kept}
    first = next(iter(shop.benches.values()))
    statistics = first.bounds[0].task.statistics is not None
    return {
        "site": config.site,
        "experiment": plan.name,
        "approve": digest(text),
        "rows": shop.facts()["rows"],
        "tests": _tests(statistics, config.share_rows),
        "runs": runs,
    }


def _tests(statistics: bool, share_rows: bool) -> str:
    if statistics:
        return "sums over the test rows (loss; counts of true against predicted class, or squared errors)"
    if share_rows:
        return "outputs and targets of every test row (share_rows = true)"
    return "metrics of the test rows, computed at the site"


def text(found: dict[str, Any]) -> str:
    """The list for people."""
    lines = [f"site {found['site']}, experiment {found['experiment']}", f'approve = "{found["approve"]}"', ""]
    for key, run in found["runs"].items():
        rows = found["rows"][key]
        lines.append(f"{key}: {rows['train']} training rows, {rows['test']} test rows, {rows['val']} validation rows")
        total = 0
        for t in run["leaves_site"]:
            shape = "x".join(map(str, t["shape"])) or "one number"
            lines.append(f"  leaves {t['when']}: {t['entry']}[{t['name']}]  {shape} {t['type']}, {t['bytes']} bytes")
            total += t["bytes"]
        lines.append(f"  in all {total} bytes")
        lines.append(f"  stays: {', '.join(run['stays']) or 'no model of its own'}; rows; memory")
    lines += ["", "besides: numbers of rows, numbers of steps, the mean training loss, and", f"  {found['tests']}"]
    return "\n".join(lines)
