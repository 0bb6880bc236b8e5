"""What happened inside of a method: conflicts, parts of the loss, prototypes, mixing, and what else plug-ins tell."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from fedloom.reports import charts
from fedloom.reports.html import Section, figure, grid
from fedloom.reports.read_runs import RunData
from fedloom.reports.report_data import CLASSES, HUES, Book, Series
from fedloom.reports.scatter import Dot, scatter
from fedloom.reports.sections.overview import _is
from fedloom.reports.svg import number
from fedloom.rounds.diagnostics.data_sketch import principal

PANELS = 6
"""Runs that a kind of picture is drawn for at most."""

ROUNDS = 200
"""Columns of a heat map at most; of more rounds some are left out, evenly."""

LAYERS = 60
"""Rows of a heat map at most."""

_KNOWN = frozenset({"bytes_up_by_kind", "bytes_down_by_kind", "terms", "lag", "sites"})


def _first(book: Book) -> Iterator[tuple[Series, RunData]]:
    """A run of every series."""
    for series in book.series:
        yield series, series.runs[0]


def _thinned(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    size = len(records)
    return records if size <= ROUNDS else [records[round(i * (size - 1) / (ROUNDS - 1))] for i in range(ROUNDS)]


def conflict(book: Book) -> Section | None:
    """Layer by round: in how many pairs of clients updates point apart (LAG)."""
    made: list[str] = []
    for series, run in _first(book):
        rounds = _thinned([r for r in run.history if isinstance(r.get("lag"), Mapping) and r["lag"].get("score")])
        if not rounds or len(made) == PANELS:
            continue
        layers = list(rounds[-1]["lag"]["score"])[:LAYERS]
        scores = [[r["lag"]["score"].get(layer) for r in rounds] for layer in layers]
        personal = [[_personal(layer, r["lag"].get("personal", ())) for r in rounds] for layer in layers]
        drawing = charts.heat(
            scores,
            layers,
            [r["round"] for r in rounds],
            marked=personal,
            label=f"conflict of each layer over rounds, {series.label}",
        )
        said = (
            "The darker, the more pairs of clients disagree in a layer. A bar below a cell: personal in the next round."
        )
        made.append(figure(drawing, series.label, said, wide=True))
    return Section("conflict", "Where clients disagree", "".join(made)) if made else None


def _personal(layer: str, leaves: object) -> bool:
    return isinstance(leaves, (list, tuple)) and any(n == layer or str(n).startswith(f"{layer}.") for n in leaves)


def parts(book: Book) -> Section | None:
    """The terms of the objective one by one: the task's loss, the supervision at each tap."""
    made: list[str] = []
    for series, run in _first(book):
        rounds = [r for r in run.history if isinstance(r.get("terms"), Mapping) and r["terms"]]
        names = list(dict.fromkeys(k for r in rounds for k in r["terms"]))
        if not names or len(made) == PANELS:
            continue
        lines = []
        for i, name in enumerate(names):
            at = [(float(r["round"]), float(r["terms"][name])) for r in rounds if _is(r["terms"].get(name))]
            css = "s local" if name == "task" else f"s s{(i - 1) % HUES}"
            lines.append(charts.Curve(name, css, [a for a, _ in at], [b for _, b in at]))
        there = [line for line in lines if line.x]
        own = [line for line in there if line.label == "task"]
        added = [line for line in there if line.label != "task"]
        said = (
            f"The task's own loss goes from {number(own[0].y[0])} to {number(own[0].y[-1])}." if own and added else ""
        )
        label = f"terms of the objective over rounds, {series.label}"
        drawing = charts.curves(added or own, label=label, x_title="round", y_title="value")
        title = f"{series.label}: {added[0].label}" if len(added) == 1 else series.label
        made.append(figure(drawing, title, said))
    if not made:
        return None
    said = "<p class='hint'>What plug-ins add to the task's own loss, with their weights in it; a part that reads an intermediate layer is named with it. Measured at the evaluations, on a batch of each of three clients before it trains.</p>"
    return Section("terms", "The parts of the loss", said + grid(made))


def prototypes(book: Book) -> Section | None:
    """The classes' prototypes on their first two principal components."""
    made: list[str] = []
    for series, run in _first(book):
        for owner, centres in run.prototypes.items():
            names = run.config.get("resolved", {}).get("classes") or []
            known = [i for i in range(len(centres)) if bool(torch.isfinite(centres[i]).all())]
            if len(known) < 3 or centres.shape[1] < 2 or len(made) == PANELS:
                continue
            x = centres[known] - centres[known].mean(0)
            at, share = principal(x, 2)
            dots = []
            for k, i in enumerate(known):
                name = str(names[i]) if i < len(names) else str(i)
                a, b = float(at[k, 0]), float(at[k, 1])
                dots.append(Dot(a, b, f"s s{i % CLASSES}", f"class {name}", 5, name if len(known) <= 24 else ""))
            titles = (f"first component, {float(share[0]):.0%} of the variance", f"second, {float(share[1]):.0%}")
            drawing = scatter(
                dots,
                label=f"prototypes of the classes, {series.label}",
                x_title=titles[0],
                y_title=titles[1],
                bare=True,
            )
            about = "" if owner == "prototypes" else f" ({owner})"
            made.append(
                figure(drawing, series.label + about, "A dot is a class: the mean feature that all clients share.")
            )
    return Section("prototypes", "Prototypes of the classes", grid(made)) if made else None


def hybrid(book: Book) -> Section | None:
    """Hybrid mode: the cloud's share of a round, and how well its step and the sites' agree."""
    shares: list[charts.Curve] = []
    agreement: list[charts.Curve] = []
    for series, run in _first(book):
        for key, lines in (("alpha", shares), ("alignment", agreement)):
            at = [(float(r["round"]), float(r[key])) for r in run.history if run.mode == "hybrid" and _is(r.get(key))]
            if at:
                lines.append(
                    charts.Curve(series.label, series.css, [a for a, _ in at], [b for _, b in at], index=series.index)
                )
    made = []
    if shares:
        drawing = charts.curves(
            shares, label="the cloud's share of each round", x_title="round", y_title="α, the cloud's share", zero=True
        )
        made.append(figure(drawing, "Mixing weight", "θ ← θ + α d_cloud + (1 − α) d_sites"))
    if agreement:
        drawing = charts.curves(
            agreement,
            label="cosine of the cloud's and the sites' steps",
            x_title="round",
            y_title="cosine",
            zero_line=True,
        )
        made.append(
            figure(drawing, "Alignment", "Cosine of the cloud's step and the sites'; below zero they pull apart.")
        )
    return Section("hybrid", "Cloud and sites", grid(made)) if made else None


def others(book: Book) -> Section | None:
    """Whatever else methods tell of their rounds, as small curves."""
    found: dict[tuple[str, str], list[charts.Curve]] = {}
    for series, run in _first(book):
        told: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for record in run.history:
            for owner, facts in record.items():
                if isinstance(facts, Mapping) and owner not in _KNOWN:
                    for key, value in _numbers(facts):
                        told.setdefault((owner, key), []).append((float(record["round"]), value))
        for name, at in told.items():
            if len(at) > 1:
                line = charts.Curve(
                    series.label, series.css, [a for a, _ in at], [b for _, b in at], index=series.index
                )
                found.setdefault(name, []).append(line)
    made = [
        figure(
            charts.curves(
                lines, label=f"{owner}: {key} over rounds", x_title="round", y_title=key, height=210, width=380
            ),
            f"{owner}: {key}",
        )
        for (owner, key), lines in list(found.items())[:24]
    ]
    if not made:
        return None
    more = f"<p class='hint'>{len(found) - 24} more are in metrics.jsonl.</p>" if len(found) > 24 else ""
    hint = "<p class='hint'>Numbers that methods record about themselves, under the name of the part that records them.</p>"
    return Section("diagnostics", "What methods tell of themselves", hint + grid(made, three=True) + more)


def _numbers(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for key, value in facts.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{key} ")
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            yield f"{prefix}{key}", float(value)


__all__ = ["conflict", "hybrid", "others", "parts", "prototypes"]
