"""The data at the outset: who has what, and how the clients' rows lie to each other."""

from __future__ import annotations

import statistics
from html import escape
from typing import Any

from fedloom.reports import charts
from fedloom.reports.html import Section, figure, grid
from fedloom.reports.report_data import CLASSES, HUES, Book
from fedloom.reports.scatter import Dot, scatter
from fedloom.reports.svg import Drawing, number

COLUMNS = 120
"""Clients in the picture of a partition at most."""

_SEED = 0


def sketches(book: Book) -> list[tuple[str, dict[str, Any]]]:
    """The different federations of the runs, each with a word on which it is."""
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    for run in book.runs:
        if run.sketch and book.federations[run.data] not in found:
            said = str(run.config.get("data", {}).get("partition", "")) if book.populations == 1 else ""
            told = ", ".join(filter(None, (str(run.sketch.get("name", "")), said, book.federations[run.data])))
            found[book.federations[run.data]] = (told, run.sketch)
    return list(found.values())


def partition(book: Book) -> Section | None:
    """Rows and classes of each client."""
    made = []
    found = sketches(book)
    half = len(found) > 1 and max(len(s["clients"]) for _, s in found) <= 20
    most = 4 if half else 3
    for told, sketch in found[:most]:
        clients = sketch["clients"]
        picked = (
            sorted(clients, key=lambda c: -sum(c["counts"]) or -c.get("train", 0))
            if len(clients) > COLUMNS
            else clients
        )
        if len(picked) > COLUMNS:
            picked = [picked[round(i * (len(picked) - 1) / (COLUMNS - 1))] for i in range(COLUMNS)]
        some = f"{COLUMNS} of {sketch['total']:,} clients, evenly chosen by size. " if sketch["total"] > COLUMNS else ""
        sizes = [c.get("train", 0) for c in clients]
        facts = _sizes(sketch["total"], sizes)
        if sketch["cloud"]:
            facts += f" The server itself holds {number(sketch['cloud'])} rows."
        if sketch["classes"]:
            rows = [(c["id"], c["counts"]) for c in picked]
            unit = "labelled pixels" if sketch["dense"] else "rows"
            said = f"{some}A column is a client, the darker a cell the larger the share of its {'pixels' if sketch['dense'] else 'rows'}. {facts}"
        else:
            rows, unit = [(c["id"], [c.get(p, 0) for p in ("train", "val", "test")]) for c in picked], "rows"
            said = f"{some}Rows for training, validation and test. {facts}"
        classes = sketch["classes"] or ["train", "val", "test"]
        label = f"classes of each client, {told}: {facts}"
        drawing = charts.shares(rows, classes, label=label, unit=unit, width=charts.WIDTH if half else 1140.0)
        made.append(figure(drawing, told or "the clients", said, wide=not half))
    if not made:
        return None
    more = f"<p class='hint'>{len(found) - most} more partitions are not drawn.</p>" if len(found) > most else ""
    return Section("partition", "Who has what", (grid(made) if half else "".join(made)) + more)


def _sizes(total: int, rows: list[int]) -> str:
    if total == 1:
        return f"One client with {number(rows[0])} training rows."
    middle = number(statistics.median(rows))
    return f"{total:,} clients; {number(min(rows))} to {number(max(rows))} training rows, median {middle}."


def projection(book: Book) -> Section | None:
    """Some rows of all clients in two dimensions, by client and by class."""
    found = [(told, s) for told, s in sketches(book) if s.get("points") and len(s["points"]["at"][0]) >= 2]
    if not found:
        return None
    told, sketch = found[0]
    points = sketch["points"]
    explained = points["explained"]
    flat = [(a[0], a[1]) for a in points["at"]]
    titles = (f"first component, {explained[0]:.0%} of the variance", f"second, {explained[1]:.0%}")
    made = []
    if sketch["total"] > 1:
        drawing = _by_client(sketch, flat, titles, "principal components")
        made.append(figure(drawing, "By client", _clients_said(sketch)))
    classes = _by_class(sketch, flat, titles, "principal components")
    if classes is not None:
        made.append(figure(classes, "By class", "A dot is a training row."))
    near = neighbours(points["at"]) if book.tsne else None
    if near is not None:
        plain = ("t-SNE", "")
        said = "Neighbours stay neighbours; distances mean little."
        if sketch["total"] > 1:
            made.append(figure(_by_client(sketch, near, plain, "t-SNE"), "By client, t-SNE", said))
        by = _by_class(sketch, near, plain, "t-SNE")
        if by is not None:
            made.append(figure(by, "By class, t-SNE", said))
    if not made:
        return None
    hint = f"<p class='hint'>{escape(told)}: {len(flat):,} training rows, evenly chosen from every client, on the principal components of their inputs.</p>"
    return Section("projection", "The clients' data in two dimensions", hint + grid(made))


def _clients_said(sketch: dict[str, Any]) -> str:
    who = sketch["points"]["client"]
    if len(set(who)) == len(who):
        return "A dot is a row of a client."
    return (
        "A dot is a training row."
        if sketch["total"] <= HUES
        else "A dot is the mean of a client's rows; small ones are rows."
    )


def _by_client(sketch: dict[str, Any], at: list[tuple[float, float]], titles: tuple[str, str], how: str) -> Drawing:
    who, ids = (
        sketch["points"]["client"],
        {i: c["id"] for i, c in zip(_indices(sketch), sketch["clients"], strict=True)},
    )
    few = sketch["total"] <= HUES
    dots = []
    centres: dict[int, list[tuple[float, float]]] = {}
    for (x, y), client in zip(at, who, strict=True):
        centres.setdefault(client, []).append((x, y))
        css = f"s s{client % HUES}" if few else "faint plainly"
        dots.append(Dot(x, y, css, f"client {ids.get(client, client)}", 3 if few else 1.6))
    for client, rows in centres.items():
        x, y = statistics.fmean(a for a, _ in rows), statistics.fmean(b for _, b in rows)
        name = str(ids.get(client, client))
        label = name if len(centres) <= 24 else ""
        css = f"s s{client % HUES} ring" if few else "s s0 ring"
        dots.append(Dot(x, y, css, f"mean of client {name}", 5 if len(centres) <= 60 else 3, label))
    return scatter(dots, label=f"rows by client on {how}", x_title=titles[0], y_title=titles[1], bare=True)


def _indices(sketch: dict[str, Any]) -> list[int]:
    """Places in the federation of the clients that a sketch describes."""
    from fedloom.rounds.diagnostics.data_sketch import CLIENTS, even

    return even(sketch["total"], CLIENTS)


def _by_class(
    sketch: dict[str, Any], at: list[tuple[float, float]], titles: tuple[str, str], how: str
) -> Drawing | None:
    labels, classes = sketch["points"]["label"], sketch["classes"]
    if labels is None or not classes or len(classes) > 24:
        return None
    dots: list[Dot] = []
    centres: dict[str, list[tuple[float, float]]] = {}
    for (x, y), label in zip(at, labels, strict=True):
        name = classes[int(label)]
        centres.setdefault(name, []).append((x, y))
        dots.append(Dot(x, y, f"s s{int(label) % CLASSES}", f"class {name}", 2.6))
    for name, rows in centres.items():
        x, y = statistics.fmean(a for a, _ in rows), statistics.fmean(b for _, b in rows)
        dots.append(Dot(x, y, f"s s{classes.index(name) % CLASSES} ring", f"mean of class {name}", 5, name))
    return scatter(dots, label=f"rows by class on {how}", x_title=titles[0], y_title=titles[1], bare=True)


def neighbours(points: list[list[float]]) -> list[tuple[float, float]] | None:
    """t-SNE of the principal components; None without scikit-learn or with few rows."""
    if len(points) < 30:
        return None
    try:
        import numpy as np
        from sklearn.manifold import TSNE
        from threadpoolctl import threadpool_limits
    except ImportError:
        return None
    made = TSNE(2, init="pca", random_state=_SEED, perplexity=min(30, len(points) // 4), max_iter=500)
    with threadpool_limits(1):  # so few rows are done before several threads have found each other
        at = made.fit_transform(np.array(points))
    return [(float(a), float(b)) for a, b in at]
