"""What came out, in a sentence, a table and curves."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from html import escape

from fedloom.comparison.statistics import interval
from fedloom.reports import charts
from fedloom.reports.html import Section, figure, grid, swatch, table
from fedloom.reports.read_runs import RunData
from fedloom.reports.report_data import Book, Series
from fedloom.reports.svg import fixed, number, scaled, size

WORDS = {
    "accuracy": "accuracy",
    "mse": "MSE",
    "mae": "MAE",
    "rmse": "RMSE",
    "auc": "AUC",
    "miou": "mIoU",
    "mf1": "mF1",
    "mprecision": "mean precision",
    "mrecall": "mean recall",
    "f1": "F1",
}


MOST = 6
"""Other metrics that are drawn at most."""


def half(values: Sequence[float]) -> float | None:
    """Half of the 95 % interval of a mean; None for fewer than two values."""
    found = interval(values)
    return None if found is None else found.half


def worded(metric: str) -> str:
    """A metric's name in a sentence."""
    return WORDS.get(metric, metric.replace("_", " "))


def headed(metric: str) -> str:
    """A metric's name at the beginning of a sentence."""
    word = worded(metric)
    return word if word != word.lower() else word[:1].upper() + word[1:]


def headline(book: Book) -> Section:
    """The best series, how sure that is, who gains; and all series in a table."""
    lines = [f"<p class='lead'>{_sentence(book)}</p>"]
    notes = [*book.notes, *dict.fromkeys(f"{s.label}: {n}" for s in book.series for r in s.runs for n in r.notes)]
    body = "".join(lines) + _tiles(book) + _table(book)
    if notes:
        shown = "".join(f"<li>{escape(n)}</li>" for n in notes[:12])
        rest = f"<li>and {len(notes) - 12} more of the kind</li>" if len(notes) > 12 else ""
        body += f"<aside class='notes'><h3>Worth knowing</h3><ul>{shown}{rest}</ul></aside>"
    return Section("headline", "What came out", body)


def _sentence(book: Book) -> str:
    word = worded(book.metric)
    if not book.ranked:
        return f"No run has been evaluated yet, so there is no {escape(word)} to show."
    best = book.ranked[0]
    mean, width = best.mean, half(best.finals)
    run = best.runs[0]
    said = f"<strong>{escape(best.label)}</strong> reaches a mean {escape(word)} of <strong>{number(mean)}</strong>"
    if width is not None:
        said += f" ± {number(width, 2)} (95 % interval over {len(best.finals)} seeds)"
    clients = len(run.values)
    if clients:
        said += " on the test rows of its one client" if clients == 1 else ""
        said += f" over {clients} clients, each with its own model on its own test rows" if clients > 1 else ""
    gains = book.gains(best)
    if gains:
        up, down = sum(v > 0 for v in gains.values()), sum(v < 0 for v in gains.values())
        over = statistics.fmean(gains.values())
        who = "clients" if book.populations == 1 else "clients (counted once for each partition)"
        said += f"; that is {over:+.4g} over training alone: {up} of {len(gains)} {who} gain and {down} lose"
    elif best.local and len(book.series) > 1:
        said += "; no method here beats training alone on average"
    if len(book.ranked) > 1 and not book.comparisons and max(len(s.finals) for s in book.series) == 1:
        said += ". One seed each: differences of the size of a seed's luck cannot be told apart"
    return said + "."


def _tiles(book: Book) -> str:
    """A few numbers at a glance, of the best series."""
    if not book.ranked:
        return ""
    best, p = book.ranked[0], book.metric
    run = best.runs[0]
    tiles = [("mean over clients", number(best.mean)), ("worst tenth of clients", number(best.over(f"{p}_worst10")))]
    if len(run.values) == 1:
        tiles = [("its one client", number(best.mean))]
    else:
        tiles.append(("spread over clients (std)", number(best.over(f"{p}_std"))))
    shared = best.over(f"global_{p}")
    if shared is not None:
        tiles.append(("one shared model, all test rows", number(shared)))
    new = best.over(f"new_{p}")
    if new is not None:
        tiles.append(("new clients, adapted", number(new)))
    tiles.append(("rounds", number(len(run.history))))
    tiles.append(("sent in all", size(best.total("bytes_up") + best.total("bytes_down"))))
    shown = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in tiles if v != "–")
    return f"<dl class='tiles' aria-label='{escape(best.label)} at a glance'>{shown}</dl>"


def _table(book: Book) -> str:
    p, local = book.metric, book.local is not None
    seeds = max(len(s.runs) for s in book.series) > 1
    shared = any(s.over(f"global_{p}") is not None for s in book.series)
    heads = ["method", f"mean {worded(p)}", *(["± 95 %", "seeds"] if seeds else []), "std over clients", "worst tenth"]
    heads += [*(["over local", "clients that gain"] if local else []), *(["shared model"] if shared else [])]
    heads += ["sent", "time", "rounds"]
    rows = []
    order = [*book.ranked, *(s for s in book.series if s not in book.ranked)]
    for s in order:
        mean, width = s.mean, half(s.finals)
        row: list[tuple[str, object]] = [(f"{swatch(s.css)} {escape(s.label)}", s.label), (_bold(s, book, mean), mean)]
        if seeds:
            row += [(number(width, 2), width), (str(len(s.runs)), len(s.runs))]
        row += [(fixed(v), v) for v in (s.over(f"{p}_std"), s.over(f"{p}_worst10"))]
        if local:
            gains = list(book.gains(s).values())
            over = statistics.fmean(gains) if gains else None
            helped = sum(v > 0 for v in gains) / len(gains) if gains else None
            row += [
                ("–" if over is None else f"{over:+.4f}", over),
                ("–" if helped is None else f"{helped:.0%}", helped),
            ]
        if shared:
            value = s.over(f"global_{p}")
            row.append((fixed(value), value))
        sent = s.total("bytes_up") + s.total("bytes_down")
        seconds = s.total("seconds_total") or s.total("seconds")
        rounds = round(statistics.fmean(len(r.history) for r in s.runs))
        row += [(size(sent), sent), (f"{number(seconds, 3)} s", seconds), (str(rounds), rounds)]
        rows.append(row)
    note = (
        f"<p class='hint'>{escape(headed(p))} of each client's own model on its own test rows, at the last evaluation; "
    )
    note += "less is better.</p>" if book.sign < 0 else "more is better.</p>"
    return note + table(heads, rows, name="results of all methods")


def _bold(series: Series, book: Book, mean: float | None) -> str:
    return f"<strong>{fixed(mean)}</strong>" if book.ranked and series is book.ranked[0] else fixed(mean)


def learning(book: Book) -> Section | None:
    """The metric over rounds and over bytes, the shared model, the training loss."""
    p = book.metric
    word = worded(p)
    several = any(len(s.runs) > 1 for s in book.series)
    single = len(book.series) == 1 and not several
    made = []
    own = _lines(book, lambda r: [(x["round"], x[p]) for x in r.history if _is(x.get(p))], clients=single)
    if own:
        said = (
            "Bands: 95 % interval over seeds."
            if several
            else "Band: the middle 80 % of the clients."
            if single and own[0].low
            else ""
        )
        drawing = charts.curves(own, label=f"{word} over rounds, by method", x_title="round", y_title=f"mean {word}")
        made.append(figure(drawing, "Clients' own models", said))
    most = max(r.total("bytes_up") + r.total("bytes_down") for r in book.runs)
    factor, unit = scaled(most)
    paid = _lines(book, lambda r: _paid(r, p, factor)) if most else []
    if paid and len(book.series) > 1:
        drawing = charts.curves(
            paid,
            label=f"{word} by what was sent, by method",
            x_title=f"{unit} sent, both ways",
            y_title=f"mean {word}",
            whole=False,
        )
        made.append(figure(drawing, "For what was sent", "How far a method gets with the same traffic."))
    shared = _lines(book, lambda r: [(x["round"], x[f"global_{p}"]) for x in r.history if _is(x.get(f"global_{p}"))])
    if shared:
        drawing = charts.curves(shared, label=f"{word} of the shared model over rounds", x_title="round", y_title=word)
        made.append(
            figure(
                drawing,
                "The shared model on everybody's test rows",
                "Methods that have no whole shared model are left out.",
            )
        )
    checked = _lines(book, lambda r: [(x["round"], x[f"val_{p}"]) for x in r.history if _is(x.get(f"val_{p}"))])
    if checked:
        drawing = charts.curves(
            checked, label=f"{word} on validation rows over rounds", x_title="round", y_title=f"mean {word}"
        )
        made.append(figure(drawing, "On validation rows"))
    losses = _lines(book, lambda r: [(x["round"], x["train_loss"]) for x in r.history if _is(x.get("train_loss"))])
    if losses:
        drawing = charts.curves(
            losses, label="training loss over rounds, by method", x_title="round", y_title="training loss"
        )
        made.append(
            figure(
                drawing,
                "Training loss",
                "Of each method's own objective: its terms differ, so heights are not to be compared.",
            )
        )
    body = grid(made)
    others = []
    for key in _metrics(book):
        lines = _lines(book, lambda r, key=key: [(x["round"], x[key]) for x in r.history if _is(x.get(key))])  # type: ignore[misc]
        if lines:
            drawing = charts.curves(
                lines,
                label=f"{worded(key)} over rounds",
                x_title="round",
                y_title=worded(key),
                height=250,
                width=420,
            )
            others.append(figure(drawing, f"{headed(key)} of clients' own models"))
    if others:
        body += f"<h3 class='sub'>By other metrics</h3>{grid(others[:MOST], three=True)}"
    return Section("learning", "How it was learned", body) if made else None


def _metrics(book: Book) -> list[str]:
    """The metrics of clients besides the primary one."""
    known = {"client", "n_train", "n_test", "rounds", "new", book.metric}
    return [k for k in dict.fromkeys(k for r in book.runs for row in r.rows for k in row) if k not in known]


def _is(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _paid(run: RunData, key: str, factor: float) -> list[tuple[float, float]]:
    sent = 0.0
    found: list[tuple[float, float]] = []
    if not run.total("bytes_up") + run.total("bytes_down"):
        return found
    for record in run.history:
        sent += (record.get("bytes_up") or 0) + (record.get("bytes_down") or 0)
        if _is(record.get(key)):
            found.append((sent / factor, record[key]))
    return found


def _lines(
    book: Book, of: Callable[[RunData], list[tuple[float, float]]], *, clients: bool = False
) -> list[charts.Curve]:
    """A curve per series: the mean over its runs where they have a common round, with intervals."""
    made = []
    for s in book.series:
        runs = [found for r in s.runs if (found := of(r))]
        if not runs:
            continue
        by: list[list[tuple[float, float]]] = [list(t) for t in zip(*runs, strict=False)]
        x = [statistics.fmean(a for a, _ in at) for at in by]
        y = [statistics.fmean(b for _, b in at) for at in by]
        curve = charts.Curve(s.label, s.css, x, y, index=s.index)
        if len(runs) > 1:
            halves = [half([b for _, b in at]) or 0.0 for at in by]
            curve.low = [v - h for v, h in zip(y, halves, strict=True)]
            curve.high = [v + h for v, h in zip(y, halves, strict=True)]
        elif clients:
            _band_of_clients(curve, s.runs[0])
        made.append(curve)
    return made


def _band_of_clients(curve: charts.Curve, run: RunData) -> None:
    """The middle 80 % of the clients around the mean of a single run."""
    at = {line["round"]: [v for v in line["clients"].values() if _is(v)] for line in run.curves}
    if all(len(at.get(int(x), ())) >= 2 for x in curve.x):
        deciles = [statistics.quantiles(at[int(x)], n=10, method="inclusive") for x in curve.x]
        curve.low, curve.high = [d[0] for d in deciles], [d[-1] for d in deciles]
