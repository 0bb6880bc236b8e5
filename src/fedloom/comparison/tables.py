"""The tables of a comparison, and their files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedloom.comparison import formats
from fedloom.comparison.aggregate import Verdicts
from fedloom.comparison.cell import Cells
from fedloom.comparison.formats import Column, Sheet
from fedloom.store import atomic

FOLDER = "tables"


def make_tables(comparison: Cells) -> dict[str, Sheet]:
    """Make the tables, by name.

    ``summary`` and ``costs`` have a row per setting and method, ``overall`` has a row per method,
    ``gap`` (where the mode is swept) a row per setting, mode and method, ``cells`` a row per run,
    and ``clients`` a row per run and client.
    """
    verdicts = Verdicts(comparison)
    made = [_summary(comparison, verdicts), _costs(comparison, verdicts), _overall(comparison, verdicts)]
    if verdicts.gaps:
        made.append(_gap(comparison, verdicts))
    made += [_cells(comparison, verdicts), _clients(comparison, verdicts)]
    return {sheet.name: sheet for sheet in made}


def write_tables(comparison: Cells, made: dict[str, Sheet]) -> list[Path]:
    """Write each table as CSV and the tables for people as Markdown and LaTeX; return the files.

    ``costs`` gets no CSV of its own: its numbers are in that of ``summary``.
    """
    place = comparison.path / FOLDER
    with atomic.writing(place):
        place.mkdir(parents=True, exist_ok=True)
    found = []
    for name, sheet in made.items():
        forms = {} if name == "costs" else {".csv": sheet.csv}
        if name not in ("cells", "clients"):
            forms |= {".md": sheet.markdown, ".tex": sheet.latex}
        for ending, form in forms.items():
            atomic.write(place / f"{name}{ending}", form().encode())
            found.append(place / f"{name}{ending}")
    return found


def _first(comparison: Cells) -> tuple[Column, ...]:
    """The columns that say what a row is of."""
    named = [Column(formats.SETTING, formats.text("setting"), left=True)] if comparison.sweep else []
    return (*named, Column("method", formats.text("method"), left=True))


def _runs(row: Any) -> str:
    failed = f" ({row['failed']} failed)" if row["failed"] else ""
    return f"{row['done']}/{row['runs']}{failed}"


def _wins(row: Any) -> str:
    n = row["wins"] + row["losses"] + row["ties"]
    return f"{row['wins']} of {n}" if n else ""


def _helped(row: Any) -> str:
    n = row["clients_better"] + row["clients_worse"] + row["clients_equal"]
    return f"{row['clients_better']}+ {row['clients_worse']}−" if n else ""


def _reached(row: Any) -> str:
    if row["target"] is None or not row["done"]:
        return ""
    if row["rounds_to_target"] is None:
        return "never"
    part = f" ({row['reached']}/{row['done']})" if row["reached"] < row["done"] else ""
    return f"{row['rounds_to_target']:.1f}{part}"


def _against(comparison: Cells) -> tuple[Column, ...]:
    return (
        Column(f"over {comparison.baseline}", formats.spread("difference", sign=True)),
        Column("p", formats.probability("p_holm")),
        Column("wins", _wins),
        Column("clients", _helped),
    )


def _explained(comparison: Cells) -> tuple[str, ...]:
    pairs = "Mean over seeds, with the half width of its 95 % interval (Student)."
    if len(comparison.methods) < 2:
        return (pairs,)
    return (
        pairs + f" Differences from {comparison.baseline} are paired by partition and seed: p of the paired t test, "
        "corrected by Holm for the number of methods; wins over runs; clients better (+) and worse (−). Positive is better.",
    )


def _summary(comparison: Cells, verdicts: Verdicts) -> Sheet:
    rows, sign = verdicts.summary, -verdicts.sign
    columns = (
        *_first(comparison),
        Column("runs", _runs),
        Column(comparison.metric, formats.spread("value"), formats.lowest(rows, "value", ["setting"], sign)),
        *_against(comparison),
        Column("rank", formats.value("rank", 2), formats.lowest(rows, "rank", ["setting"], 1.0)),
    )
    title = f"{comparison.metric} of the clients' own models on their own test rows"
    return Sheet("summary", title, rows, columns, (*_explained(comparison), *_failures(comparison)))


def _costs(comparison: Cells, verdicts: Verdicts) -> Sheet:
    rows, sign = verdicts.summary, -verdicts.sign
    aim = f"{comparison.target:g}" if comparison.target is not None else f"{comparison.baseline}'s own mean"
    columns = (
        *_first(comparison),
        Column("worst 10 %", formats.value("worst10"), formats.lowest(rows, "worst10", ["setting"], sign)),
        Column("shared model", formats.value("shared")),
        Column("new clients", formats.value("new")),
        Column("rounds to target", _reached),
        Column("MB to target", formats.size("bytes_to_target")),
        Column("MB", formats.size("bytes")),
        Column("seconds", formats.value("seconds", 1)),
        Column("Pareto", lambda row: "✓" if row["pareto"] else ""),
    )
    note = (
        f"Means over seeds. Rounds and MB to target: until {comparison.metric} reaches {aim}, over the runs that reach it. "
        f"Pareto: no method is at least as good in {comparison.metric}, bytes and seconds, and better in one of them."
    )
    return Sheet("costs", f"{comparison.metric}, communication and computation", rows, columns, (note,))


def _overall(comparison: Cells, verdicts: Verdicts) -> Sheet:
    rows = verdicts.overall
    columns = (
        Column("method", formats.text("method"), left=True),
        Column("runs", _runs),
        *_against(comparison),
        Column("p (Wilcoxon)", formats.probability("p_wilcoxon")),
        Column("p (sign)", formats.probability("p_sign")),
        Column("rank", formats.value("rank", 2), formats.lowest(rows, "rank", [], 1.0)),
    )
    blocks = max((r["ranked"] for r in rows), default=0)
    note = f"Over all settings and seeds. Ranks are means over the {blocks} pairs of setting and seed in which no method is missing."
    return Sheet("overall", f"Methods against {comparison.baseline}, over all runs", rows, columns, (note,))


def _gap(comparison: Cells, verdicts: Verdicts) -> Sheet:
    rows = verdicts.gaps
    columns = (
        *([Column(formats.SETTING, formats.text("setting"), left=True)] if len(comparison.sweep) > 1 else []),
        Column("mode", formats.text("mode"), left=True),
        Column("method", formats.text("method"), left=True),
        Column("gap", formats.spread("gap", sign=True)),
        Column("closed", formats.spread("closed", sign=True)),
        Column("p", formats.probability("p")),
    )
    note = (
        f"Gap: {comparison.metric} of centralised training less that of the mode, paired by seed. "
        f"Closed: how much smaller it is than that of {comparison.baseline}; p of the paired t test."
    )
    return Sheet("gap", "Unification gap", rows, columns, (note,))


def _cells(comparison: Cells, verdicts: Verdicts) -> Sheet:
    return Sheet("cells", "Every run", list(verdicts.cells()), ())


def _clients(comparison: Cells, verdicts: Verdicts) -> Sheet:
    return Sheet("clients", "Every client of every run", list(verdicts.clients()), ())


def _failures(comparison: Cells) -> list[str]:
    found = comparison.failed
    told = [", ".join(w for w in (c.method, c.setting, f"seed {c.seed}") if w) + f": {c.failure}" for c in found[:10]]
    more = [f"... and {len(found) - 10} more"] if len(found) > 10 else []
    return [f"Failed: {t}" for t in [*told, *more]]
