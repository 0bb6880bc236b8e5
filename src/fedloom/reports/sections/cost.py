"""What it costs, and what it costs not to pool the data."""

from __future__ import annotations

from html import escape

from fedloom.reports import charts
from fedloom.reports.html import Section, figure, grid, table
from fedloom.reports.report_data import Book, Series
from fedloom.reports.scatter import Dot, scatter
from fedloom.reports.sections.overview import worded
from fedloom.reports.svg import Drawing, number, scaled, size


def cost(book: Book) -> Section | None:
    """Bytes by kind, seconds, and the metric against both."""
    made = []
    kinds = _kinds(book)
    sent = [(s.label, _parts(s, kinds)) for s in book.series]
    if any(parts for _, parts in sent):
        drawing = charts.bars(
            sent, label="bytes sent by each method, by kind", title="sent up and down in all rounds", show="bytes"
        )
        made.append(
            figure(
                drawing,
                "Bytes",
                "Blue: from the clients; grey: to them. Tensors that really travel, a broadcast counted once per client.",
            )
        )
    time = [
        (
            s.label,
            [("training and aggregation", "up", s.total("seconds")), ("evaluation", "plain", s.total("seconds_eval"))],
        )
        for s in book.series
    ]
    drawing = charts.bars(time, label="seconds of each method", title="seconds", show="seconds")
    where = " and ".join(sorted({str(r.config.get("resolved", {}).get("device", "?")) for r in book.runs}))
    made.append(
        figure(
            drawing,
            "Time",
            f"Blue: training and aggregation; grey: evaluation. Measured on {where}, with what else ran there.",
        )
    )
    if len(book.ranked) > 1:
        word = worded(book.metric)
        factor, unit = scaled(max(s.total("bytes_up") + s.total("bytes_down") for s in book.ranked))
        for key, title, scale in (
            ("bytes", f"{unit} sent, both ways", factor),
            ("seconds", "seconds of training", 1.0),
        ):
            plane = _front(book, key, title, scale, word)
            if plane is not None:
                said = (
                    "On the line: no other method is both better and cheaper." if 'class="front"' in str(plane) else ""
                )
                made.append(figure(plane, f"{word} against {key}", said))
    return Section("cost", "At what price", grid(made)) if made else None


def _kinds(book: Book) -> list[str]:
    found: dict[str, None] = {}
    for run in book.runs:
        for record in run.history:
            for way in ("up", "down"):
                found |= dict.fromkeys(f"{k}" for k in record.get(f"bytes_{way}_by_kind") or {})
    return list(found)


def _parts(series: Series, kinds: list[str]) -> list[tuple[str, str, float]]:
    made = []
    for way, css in (("up", "up"), ("down", "plain")):
        for kind in kinds:
            total = sum((r.get(f"bytes_{way}_by_kind") or {}).get(kind, 0) for run in series.runs for r in run.history)
            if total:
                made.append((f"{kind} {way}", css, total / len(series.runs)))
    return made


def _front(book: Book, key: str, title: str, scale: float, word: str) -> Drawing | None:
    """The methods by price and metric, and those that no other beats in both."""
    points = []
    for s in book.ranked:
        price = s.total("bytes_up") + s.total("bytes_down") if key == "bytes" else s.total("seconds")
        points.append((price / scale, float(s.mean or 0.0), s))
    if max(p for p, _, _ in points) <= 0:
        return None
    front = [
        (x, y)
        for x, y, _ in points
        if not any((a <= x and b * book.sign >= y * book.sign) and (a, b) != (x, y) for a, b, _ in points)
    ]
    dots = [
        Dot(
            x,
            y,
            s.css,
            f"{s.label}: {number(y)}, {size(x * scale) if key == 'bytes' else f'{number(x, 3)} s'}",
            5,
            s.label,
            s.index,
        )
        for x, y, s in points
    ]
    return scatter(
        dots, label=f"{word} of each method against {key}", x_title=title, y_title=f"mean {word}", line=sorted(front)
    )


def gap(book: Book) -> Section | None:
    """The unification gap: centralised less federated (and hybrid), for each method in both modes."""
    by: dict[tuple[str, str], dict[str, Series]] = {}
    for s in book.series:
        run = s.runs[0]
        by.setdefault((run.method, run.setting), {}).setdefault(run.mode, s)
    rows, shown = [], []
    for (method, setting), modes in by.items():
        if "centralised" not in modes or len(modes) < 2 or any(s.mean is None for s in modes.values()):
            continue
        top = modes["centralised"].mean
        assert top is not None
        name = " · ".join(filter(None, (method, setting)))
        row: list[tuple[str, object]] = [(escape(name), name), (number(top), top)]
        for mode in ("federated", "hybrid"):
            mean = modes[mode].mean if mode in modes else None
            left = None if mean is None else book.sign * (top - mean)
            row += [(number(mean), mean), ("–" if left is None else f"{left:+.4f}", left)]
            if left is not None:
                shown.append((f"{name} · {mode}", [("gap", "up", max(left, 0.0))]))
        rows.append(row)
    if not rows:
        return None
    heads = ["method", "centralised", "federated", "gap", "hybrid", "gap"]
    hint = (
        "<p class='hint'>The unification gap: how much better one model trained on all rows in one place is than the same method without "
        "moving rows. Compare a method with and without a plug-in to see what the plug-in closes of it.</p>"
    )
    drawing = charts.bars(
        shown, label="unification gap by method and mode", title=f"gap in {worded(book.metric)} (0 where it is closed)"
    )
    return Section(
        "gap",
        "What is lost by not pooling",
        hint + table(heads, rows, name="unification gap") + grid([figure(drawing, "Gap to centralised training")]),
    )
