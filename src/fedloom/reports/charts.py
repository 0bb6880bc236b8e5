"""The kinds of picture that a report draws."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fedloom.reports.svg import CHARACTER, Axis, Drawing, number, short, size, spanned, spread

WIDTH = 560.0
"""Of a drawing that takes half of the page."""


MANY = 120
"""Clients from which on single bars cannot be told apart."""


@dataclass(slots=True)
class Curve:
    """A line with a band.

    Args:
        label: what it is.
        css: its classes.
        x: positions.
        y: values.
        low: lower edge of the band; empty for none.
        high: upper edge.
        index: the series that it belongs to; None where it cannot be hidden.
    """

    label: str
    css: str
    x: list[float]
    y: list[float]
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    index: int | None = None


def curves(
    lines: Sequence[Curve],
    *,
    label: str,
    x_title: str,
    y_title: str,
    whole: bool = True,
    zero: bool = False,
    unit: str = "",
    height: float = 300.0,
    width: float = WIDTH,
    zero_line: bool = False,
) -> Drawing:
    """Lines with bands, each named at its end; pointing at the drawing tells the values."""
    names = [short(c.label, 34) for c in lines]
    right = 14 + (max(len(n) for n in names) * CHARACTER if len(lines) > 1 else 0)
    left, top, bottom = 52.0, 30.0, height - 40
    drawing = Drawing(width, height, label, "chart curves")
    xs = [v for c in lines for v in c.x]
    ys = [v for c in lines for v in [*c.y, *c.low, *c.high]]
    low, high = (min(xs), max(xs)) if xs else (0.0, 1.0)
    x = Axis(low, high, left, width - right) if high > low else Axis(low - 0.5, low + 0.5, left, width - right)
    y = Axis(*spanned(ys, zero=zero or zero_line), bottom, top)
    drawing.y_axis(y, left, width - right, y_title)
    if zero_line:
        drawing.line(left, y.at(0), width - right, y.at(0), "axis")
    drawing.x_axis(x, bottom, x_title, whole=whole)
    for c in lines:
        drawing.begin(c.index)
        if c.low and c.high:
            drawing.area(_at(x, y, c.x, c.high), _at(x, y, c.x, c.low), f"band {c.css}")
        drawing.end()
    for c in lines:
        drawing.begin(c.index)
        drawing.path(_at(x, y, c.x, c.y), f"line {c.css}")
        if 1 < len(c.x) <= 12:
            for px, py in _at(x, y, c.x, c.y):
                drawing.dot(px, py, 2.2, f"dot {c.css}")
        drawing.end()
    if len(lines) > 1:
        ends = [y.at(c.y[-1]) if c.y else bottom for c in lines]
        for c, name, end, at in zip(lines, names, ends, spread(ends, 13, top, bottom), strict=True):
            drawing.begin(c.index)
            last = x.at(c.x[-1]) if c.x else x.end
            drawing.add(f'<path d="M{last + 3:g} {end:g} L{x.end + 8:g} {at:g}" class="leader {c.css}"/>')
            drawing.text(x.end + 11, at + 3.5, name, f"name {c.css}")
            drawing.end()
    drawing.data = {
        "x": [x.low, x.high, x.start, x.end],
        "y": [y.low, y.high, y.start, y.end],
        "unit": unit,
        "title": x_title,
        "lines": [
            {"n": c.label, "c": c.css, "s": c.index, "x": [_r(v) for v in c.x], "y": [_r(v) for v in c.y]}
            | ({"l": [_r(v) for v in c.low], "h": [_r(v) for v in c.high]} if c.low else {})
            for c in lines
        ],
    }
    return drawing


def _at(x: Axis, y: Axis, xs: Sequence[float], ys: Sequence[float]) -> list[tuple[float, float]]:
    return [(x.at(a), y.at(b)) for a, b in zip(xs, ys, strict=True)]


def _r(value: float) -> float:
    return float(f"{value:.5g}")


@dataclass(slots=True)
class Strip:
    """The clients of one series: values by client."""

    label: str
    css: str
    values: Mapping[str, float]
    index: int | None = None


def strips(rows: Sequence[Strip], *, label: str, title: str, width: float = WIDTH) -> Drawing:
    """A line of dots per series, one per client, with the middle half and the median."""
    left = 14 + max(len(short(r.label, 34)) for r in rows) * CHARACTER
    step, top = 34.0, 12.0
    height = top + step * len(rows) + 44
    drawing = Drawing(width, height, label, "chart strips")
    x = Axis(*spanned([v for r in rows for v in r.values.values()], margin=0.03), left, width - 16)
    for value in x.ticks(6):
        drawing.line(x.at(value), top, x.at(value), height - 44, "rule")
    drawing.x_axis(x, height - 44, title)
    for i, row in enumerate(rows):
        y = top + step * (i + 0.5)
        drawing.begin(row.index)
        drawing.text(left - 8, y + 4, short(row.label, 34), "name", "end")
        values = sorted(row.values.values())
        if len(values) > 3:
            q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
            drawing.rect(x.at(q1), y - 10, x.at(q3) - x.at(q1), 20, f"box {row.css}")
            drawing.line(x.at(median), y - 10, x.at(median), y + 10, f"median {row.css}")
        many = len(values) > 200
        for k, (client, value) in enumerate(row.values.items()):
            if not math.isfinite(value):
                continue
            # Golden-ratio steps keep equal values apart without a random number.
            off = ((k * 0.618) % 1 - 0.5) * 16
            css = f"dot client {row.css}" + (" faint" if many else "")
            drawing.dot(x.at(value), round(y + off, 2), 1.6 if many else 3, css, f"{client}: {number(value)}")
        drawing.end()
    return drawing


def gains(
    values: Mapping[str, float],
    *,
    label: str,
    title: str,
    names: bool,
    span: tuple[float, float] | None = None,
    width: float = 360.0,
) -> Drawing:
    """A bar per client, ordered: up where it gains, down where it loses.

    Args:
        values: gains by client.
        label: what it shows.
        title: of the axis.
        names: whether clients are named below their bars.
        span: least and largest gain of the axis, so that several drawings can be compared.
        width: of the drawing.
    """
    ordered = sorted(values.items(), key=lambda item: item[1])
    left, top, height = 46.0, 24.0, 190.0
    bottom = height - (34 if names else 26)
    drawing = Drawing(width, height, label, "chart gains")
    y = Axis(*spanned(span or [v for _, v in ordered], zero=True), bottom, top)
    drawing.y_axis(y, left, width - 8, title, 4)
    step = (width - 8 - left) / max(1, len(ordered))
    zero = y.at(0)
    if len(ordered) > MANY:
        for css in ("up", "down"):
            edge = [
                (left + (i + 0.5) * step, y.at(max(v, 0) if css == "up" else min(v, 0)))
                for i, (_, v) in enumerate(ordered)
            ]
            drawing.area([(left, zero), *edge, (width - 8, zero)], [(left, zero), (width - 8, zero)], f"bar {css}")
        ordered = []
    for i, (client, value) in enumerate(ordered):
        css = "up" if value > 0 else "down" if value < 0 else "same"
        tall = max(abs(y.at(value) - zero), 1.0)
        top_of = zero - tall if value >= 0 else zero
        gap = 0.15 * step
        drawing.rect(left + i * step + gap, top_of, step - 2 * gap, tall, f"bar {css}", f"{client}: {value:+.4g}")
        if names:
            drawing.text(left + (i + 0.5) * step, bottom + 14, short(client, 7), "tick", "middle")
    drawing.line(left, zero, width - 8, zero, "axis")
    if not names:
        drawing.text((left + width) / 2, height - 8, f"{len(values):,} clients, in order", "label", "middle")
    return drawing


def shares(
    rows: Sequence[tuple[str, Sequence[float]]], classes: Sequence[str], *, label: str, unit: str, width: float = 1140.0
) -> Drawing:
    """A column per client, a cell per class: the darker, the more it has; above it how many rows in all."""
    left = max(54.0, 14 + max([len(short(c, 18)) for c in classes] or [4]) * CHARACTER)
    bars, cell_h = 70.0, max(9.0, min(20.0, 260.0 / max(1, len(classes))))
    top = 26.0
    grid = top + bars + 8
    named = len(rows) <= 40
    height = grid + cell_h * len(classes) + (34 if named else 24)
    drawing = Drawing(width, height, label, "chart shares")
    step = min(56.0, (width - left - 10) / max(1, len(rows)))
    right = left + step * len(rows)
    totals = [sum(values) for _, values in rows]
    y = Axis(0, max([*totals, 1]) * 1.05, top + bars, top)
    drawing.y_axis(y, left, right, unit, 2)
    gap = 1.0 if step > 6 else 0.0
    for i, (client, values) in enumerate(rows):
        x0 = left + i * step
        at = y.at(totals[i])
        drawing.rect(
            x0 + gap, at, step - 2 * gap, top + bars - at, "bar plain", f"{client}: {number(int(totals[i]))} {unit}"
        )
        for k, value in enumerate(values):
            if value:
                share = value / totals[i]
                tip = f"{client}: {number(int(value))} of class {classes[k]} ({share:.0%})"
                level = f"q{min(8, int(share**0.5 * 9))}"
                drawing.rect(x0 + gap, grid + k * cell_h, step - 2 * gap, cell_h - 1, level, tip)
        if named:
            drawing.text(x0 + step / 2, height - 18, short(client, 8), "tick", "middle")
    for k, name in enumerate(classes):
        drawing.text(left - 6, grid + (k + 0.75) * cell_h, short(name, 18), "tick", "end")
    drawing.text((left + right) / 2, height - 4, "clients", "label", "middle")
    return drawing


def heat(
    values: Sequence[Sequence[float | None]],
    names: Sequence[str],
    columns: Sequence[int],
    *,
    label: str,
    marked: Sequence[Sequence[bool]] | None = None,
    unit: str = "",
    width: float = 1140.0,
) -> Drawing:
    """Rows by rounds: the darker, the larger; a line above a cell marks it."""
    left = 16 + max(len(short(n, 30)) for n in names) * CHARACTER
    cell_h, top = 20.0, 8.0
    height = top + cell_h * len(names) + 42
    drawing = Drawing(width, height, label, "chart heat")
    step = min(28.0, (width - left - 10) / max(1, len(columns)))
    most = max([v for row in values for v in row if v is not None] or [1.0]) or 1.0
    for i, name in enumerate(names):
        y = top + i * cell_h
        drawing.text(left - 6, y + 14, short(name, 30), "tick", "end")
        for k, value in enumerate(values[i]):
            if value is None:
                continue
            level = min(8, int(max(value, 0) / most * 8.999))
            here = marked is not None and marked[i][k]
            tip = f"{name}, round {columns[k]}: {number(value)}{unit}" + (
                ", personal in the next round" if here else ""
            )
            drawing.rect(left + k * step, y, max(step - 1, 0.5), cell_h - 1, f"q{level}", tip)
            if here:
                drawing.rect(left + k * step, y + cell_h - 5, max(step - 1, 0.5), 3, "mark")
    every = max(1, math.ceil(34 / step))
    for k, column in enumerate(columns):
        if k % every == 0:
            drawing.text(left + (k + 0.5) * step, height - 26, str(column), "tick", "middle")
    drawing.text(left + step * len(columns) / 2, height - 8, "round", "label", "middle")
    return drawing


def bars(
    rows: Sequence[tuple[str, Sequence[tuple[str, str, float]]]],
    *,
    label: str,
    title: str,
    show: str = "",
    width: float = WIDTH,
) -> Drawing:
    """A bar per row, made of parts ``(name, classes, value)``, with its total at the end.

    Args:
        rows: names and parts.
        label: what it shows.
        title: of the axis.
        show: "bytes" or "seconds" to write numbers so.
    """
    left = 14 + max(len(short(name, 30)) for name, _ in rows) * CHARACTER
    step, top = 26.0, 8.0
    height = top + step * len(rows) + 26
    drawing = Drawing(width, height, label, "chart bars")
    most = max([sum(v for _, _, v in parts) for _, parts in rows] or [1.0]) or 1.0
    x = Axis(0, most, left, width - 84)
    for i, (name, parts) in enumerate(rows):
        y = top + i * step
        drawing.text(left - 8, y + 16, short(name, 30), "name", "end")
        at = 0.0
        for part, css, value in parts:
            drawing.rect(
                x.at(at),
                y + 4,
                x.at(at + value) - x.at(at),
                step - 8,
                f"bar {css}",
                f"{name}, {part}: {_shown(value, show)}",
            )
            at += value
        drawing.text(x.at(at) + 6, y + 16, _shown(at, show), "tick")
    drawing.line(left, top, left, height - 22, "axis")
    drawing.text((left + width - 84) / 2, height - 6, title, "label", "middle")
    return drawing


def _shown(value: float, show: str) -> str:
    if show == "bytes":
        return size(value)
    return f"{number(value, 3)} s" if show == "seconds" else number(value)
