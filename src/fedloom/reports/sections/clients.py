"""The clients, one by one: who is where, who gains and who loses."""

from __future__ import annotations

import math
import statistics
from html import escape
from typing import Any

from fedloom.reports import charts
from fedloom.reports.html import Section, figure, grid, table
from fedloom.reports.report_data import Book, Series
from fedloom.reports.sections.overview import worded
from fedloom.reports.svg import Axis, Drawing, fixed, number, spanned

LINES = 60
"""Clients whose curves are drawn at most; of more, the worst, the best and some in between."""

ROWS = 2000
"""Clients in the table at most."""

PANELS = 12
"""Methods whose gains are drawn at most, the best first."""


def distribution(book: Book) -> Section | None:
    """A dot per client, and what each gains over training alone."""
    word = worded(book.metric)
    rows = []
    for s in book.series:
        values = {k: statistics.fmean(v) for k, v in book.of_clients(s).items()}
        if values:
            rows.append(charts.Strip(s.label, s.css, values, s.index))
    if not rows or max(len(r.values) for r in rows) < 2:
        return None
    drawing = charts.strips(
        rows, label=f"{word} of every client, by method", title=f"{word} of a client's own model", width=1140
    )
    body = figure(
        drawing, "Every client", "A dot is a client; the box holds the middle half, its line is the median.", wide=True
    )
    panels = []
    gained = [(s, found) for s in book.ranked if not s.local and (found := book.gains(s))][:PANELS]
    every = [v for _, found in gained for v in found.values()]
    for s, gains in gained:
        up, down = sum(v > 0 for v in gains.values()), sum(v < 0 for v in gains.values())
        said = f"{up} gain, {down} lose, {len(gains) - up - down} the same; {statistics.fmean(gains.values()):+.4g} on average"
        drawing = charts.gains(
            gains,
            label=f"gain of every client of {s.label} over local training: {said}",
            title=f"gain in {word}",
            names=len(gains) <= 20 and max(map(len, gains)) <= 7,
            span=(min(every), max(every)),
        )
        panels.append(figure(drawing, s.label, said))
    if panels:
        body += (
            "<h3 class='sub'>Who gains and who loses against training alone</h3>"
            "<p class='hint'>A bar is a client: its metric less what it reaches with its own rows only (blue up: better; orange down: worse).</p>"
            f"{grid(panels, three=True)}"
        )
    return Section("clients", "For whom", body)


def client_curves(book: Book) -> Section | None:
    """The metric of single clients over rounds, a panel per method."""
    word = worded(book.metric)
    drawn = []
    for s in book.series[:PANELS]:
        run = s.runs[0]
        if len(run.curves) < 2:
            continue
        chosen = _chosen(run.curves[-1]["clients"])
        lines = []
        for client in chosen:
            at = [
                (r["round"], v)
                for r in run.curves
                if isinstance(v := r["clients"].get(client), (int, float)) and math.isfinite(v)
            ]
            if len(at) > 1:
                lines.append((client, [float(a) for a, _ in at], [float(b) for _, b in at]))
        if not lines:
            continue
        drawn.append((s, lines, len(run.curves[-1]["clients"])))
    if not drawn:
        return None
    every = [v for _, lines, _ in drawn for _, _, y in lines for v in y]
    made = [_spaghetti(s, lines, total, word, spanned(every)) for s, lines, total in drawn]
    said = "<p class='hint'>A line is a client; point at one to see which. The same client is marked in all panels.</p>"
    return Section("client-curves", "Client by client over the rounds", said + grid(made, three=True))


def _chosen(last: dict[str, float | None]) -> list[str]:
    there = sorted((k for k, v in last.items() if v is not None), key=lambda k: last[k] or 0.0)
    if len(there) <= LINES:
        return there
    return [there[round(i * (len(there) - 1) / (LINES - 1))] for i in range(LINES)]


def _spaghetti(
    s: Series, lines: list[tuple[str, list[float], list[float]]], total: int, word: str, span: tuple[float, float]
) -> str:
    width, height, left = 360.0, 210.0, 46.0
    drawing = Drawing(width, height, f"{word} of single clients over rounds, {s.label}", "chart clients")
    xs = [v for _, x, _ in lines for v in x]
    x = Axis(min(xs), max(xs), left, width - 12)
    y = Axis(*span, height - 40, 24)
    drawing.y_axis(y, left, width - 12, word, 4)
    drawing.x_axis(x, height - 40, "round", whole=True, wanted=5)
    for client, at, values in lines:
        points = [(x.at(a), y.at(b)) for a, b in zip(at, values, strict=True)]
        more = f' data-client="{escape(client)}" data-tip="{escape(client)}: {number(values[-1])} at the end"'
        drawing.path(points, f"line thin {s.css}", more)
    shown = f"{len(lines)} of {total} clients, evenly chosen by their last value" if len(lines) < total else ""
    seed = f"seed {s.runs[0].seed}" if len(s.runs) > 1 else ""
    return figure(drawing, s.label, "; ".join(filter(None, (shown, seed))))


def client_table(book: Book) -> Section | None:
    """A row per client: its rows, how often it took part, and its metric with every method."""
    several = len(book.series) > 1
    columns: dict[str, dict[str, float | None]] = {}
    rows: dict[str, list[dict[str, Any]]] = {}
    for s in book.series:
        columns[s.label] = {k: statistics.fmean(v) for k, v in book.of_clients(s).items()}
        for run in s.runs:
            for row in run.rows:
                rows.setdefault(book.named(run, str(row["client"])), []).append(row)
    facts = {name: _merged(found) for name, found in rows.items()}
    if not facts:
        return None
    names = list(facts)
    best = book.ranked[0] if book.ranked else book.series[0]
    gained = book.gains(best)
    heads = ["client"]
    cells: list[list[tuple[str, object]]] = [[(escape(n), n)] for n in names]
    known = [
        ("n_train", "training rows"),
        ("n_test", "test rows"),
        *([] if several else [("rounds", "rounds taken part")]),
    ]
    known = [(k, h) for k, h in known if any(facts[n].get(k) is not None for n in names)]
    _column(heads, cells, known, facts, names)
    if several:
        for s in book.series:
            heads.append(s.label)
            for i, n in enumerate(names):
                value = columns[s.label].get(n)
                cells[i].append((fixed(value), value))
    else:
        skip = {"client", "n_train", "n_test", "rounds", "new"}
        metrics = [k for k in dict.fromkeys(k for n in names for k in facts[n]) if k not in skip]
        metrics.sort(key=lambda k: k != book.metric)
        _column(heads, cells, [(k, worded(k)) for k in metrics], facts, names)
    if gained:
        heads.append(f"{best.label} over local" if several else "over local")
        for i, n in enumerate(names):
            value = gained.get(n)
            cells[i].append(("–" if value is None else f"{value:+.4f}", value))
    shown = cells[:ROWS]
    marks = ["new" if facts[n].get("new") else "" for n in names]
    more = f" The first {ROWS:,} of {len(names):,} clients." if len(names) > ROWS else ""
    fresh = " Clients in italics never took part and were adapted at the end." if any(marks) else ""
    hint = f"<p class='hint'>Press a head to sort; type to filter.{more}{fresh}</p>"
    tools = (
        "<p class='tools'><label>Filter clients <input type='search' id='client-filter' placeholder='part of a name'></label> "
        f"<output id='client-count' for='client-filter'>{len(shown):,} client{'s' if len(shown) != 1 else ''}</output></p>"
    )
    body = hint + tools + table(heads, shown, name="clients", css="clients tall", marks=marks)
    return Section("client-table", "Every client in numbers", body)


def _merged(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A client's row: the mean over its runs of every number."""
    if len(rows) == 1:
        return rows[0]
    found: dict[str, Any] = {}
    for key in dict.fromkeys(k for row in rows for k in row):
        values = [row[key] for row in rows if row.get(key) is not None]
        same = len(set(values)) == 1
        numbers = all(isinstance(v, (int, float)) for v in values)
        found[key] = values[0] if same else statistics.fmean(values) if values and numbers else None
    return found


def _column(
    heads: list[str],
    cells: list[list[tuple[str, object]]],
    known: list[tuple[str, str]],
    facts: dict[str, dict[str, Any]],
    names: list[str],
) -> None:
    for key, head in known:
        heads.append(head)
        for i, n in enumerate(names):
            value = facts[n].get(key)
            shown = (
                escape(value) if isinstance(value, str) else number(value) if isinstance(value, int) else fixed(value)
            )
            cells[i].append((shown, value))
