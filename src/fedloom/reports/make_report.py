"""``fl.report``: write runs as one self-contained HTML file."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from fedloom.comparison.record import Comparison
from fedloom.errors import UserError
from fedloom.reports.html import swatch
from fedloom.reports.read_runs import Source, collect
from fedloom.reports.report_data import Book
from fedloom.reports.sections import SECTIONS
from fedloom.runs.result import Result
from fedloom.store import atomic

NAME = "report.html"


def report(
    runs: Source | Sequence[Source], out: str | Path | None = None, *, title: str = "", tsne: bool = True
) -> Path:
    """Writes one self-contained HTML file about a run, several runs or a comparison; it needs no network to be read.

    Args:
        runs: a run's folder, a comparison's, or a folder that holds runs; a ``Result`` or a ``Comparison``; or several of these.
            Runs that are not finished are shown as far as they got.
        out: the file, or a folder to write ``report.html`` into. Without, ``report.html`` in the folder of the run or the
            comparison; of several, in the folder that holds them all.
        title: of the page.
        tsne: whether the clients' rows are also drawn by t-SNE, where scikit-learn is there; it takes a few seconds.

    Returns:
        The file.

    Raises:
        UserError: there is no run, or the runs are judged by different metrics.

    Example:
        >>> import tempfile
        >>> import fedloom as fl
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     made = fl.fit("fedavg", "mlp", {"name": "digits", "clients": 3}, rounds=2, out=f"{folder}/run", progress=False)
        ...     fl.report(made).name
        'report.html'
    """
    sources = [runs] if isinstance(runs, (str, Path, Result, Comparison)) else list(runs)
    found, comparisons, notes = collect(sources)
    target = _target(out, sources)
    _write(target, page(Book(found, comparisons, notes, title, tsne)))
    return target


def watch(
    runs: Sequence[Path], out: Path | None, every: float, *, title: str = "", said: Callable[[Path], object]
) -> Path:
    """A page that is written anew every few seconds, and shows itself anew, until its runs are finished.

    Args:
        runs: folders.
        out: as for :func:`report`.
        every: seconds.
        title: of the page.
        said: called with the file when it is there for the first time.
    """
    target, first = _target(out, runs), True
    while True:
        found, comparisons, notes = collect(runs)
        waiting = any(cell.state in ("waiting", "unfinished") for c in comparisons for cell in c.cells)
        going = waiting or not all(r.finished for r in found)
        _write(target, page(Book(found, comparisons, notes, title, tsne=not going), refresh=every if going else 0))
        if first:
            said(target)
            first = False
        if not going:
            return target
        time.sleep(every)


def _write(target: Path, text: str) -> None:
    if not target.parent.is_dir():
        with atomic.writing(target.parent):
            target.parent.mkdir(parents=True, exist_ok=True)
    atomic.write(target, text.encode())


def _target(out: str | Path | None, sources: Sequence[Source]) -> Path:
    if out is not None:
        place = Path(out)
        return place / NAME if place.is_dir() or not place.suffix else place
    places = [Path(s) if isinstance(s, (str, Path)) else s.path for s in sources]
    known = [p.resolve() for p in places if p is not None]
    if not known:
        raise UserError("report: none of the runs has a folder; say where to write with out='report.html'")
    if len(known) == 1:
        return known[0] / NAME
    shared = known[0]
    while not all(p.is_relative_to(shared) for p in known):
        shared = shared.parent
    return (shared if shared != Path(shared.anchor) else Path.cwd()) / NAME


def page(book: Book, refresh: float = 0) -> str:
    """A whole report as HTML; with a number of seconds after which a browser loads it again, if asked."""
    found = [made for section in SECTIONS if (made := section(book)) is not None]
    assets = files("fedloom.reports") / "assets"
    style = (assets / "style.css").read_text(encoding="utf-8")
    script = (assets / "script.js").read_text(encoding="utf-8")
    again = f'<meta http-equiv="refresh" content="{refresh:g}">' if refresh else ""
    title = escape(book.title or _title(book))
    links = "".join(f'<a href="#{s.key}">{escape(s.title)}</a>' for s in found)
    body = "".join(
        f'<section id="{s.key}" aria-labelledby="{s.key}-title"><h2 id="{s.key}-title">{escape(s.title)}</h2>{s.body}</section>'
        for s in found
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'{again}<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
        "script-src 'unsafe-inline'\">"
        f"<style>{style}</style></head><body>"
        f"<header><h1>{title}</h1><p>{escape(_about(book))}</p>"
        '<button type="button" id="theme" aria-label="switch between light and dark">light / dark</button></header>'
        f'<nav aria-label="sections">{links}</nav>{_legend(book)}<main>{body}</main>'
        '<div id="tip" role="status" hidden></div>'
        f"<footer>made with fedloom from {len(book.runs)} run{'s' if len(book.runs) != 1 else ''}</footer>"
        f"<script>{script}</script></body></html>"
    )


def _title(book: Book) -> str:
    labels = [s.label for s in book.series]
    data = next((str(r.sketch.get("name")) for r in book.runs if r.sketch.get("name")), "")
    data = data or str(book.runs[0].config.get("data", {}).get("name", ""))
    runs = [s.runs[0] for s in book.series]
    methods, modes, settings = ({r.method for r in runs}, {r.mode for r in runs}, {r.setting for r in runs})
    what = labels[0] if len(labels) == 1 else f"{len(methods)} methods" if len(methods) > 1 else next(iter(methods))
    what += f" in {len(modes)} modes" if len(modes) > 1 else ""
    what += f" in {len(settings)} settings" if len(settings) > 1 else ""
    return f"{what} on {data}" if data else what


def _about(book: Book) -> str:
    config = book.runs[0].config
    clients = config.get("resolved", {}).get("clients")
    seeds = sorted({r.seed for r in book.runs})
    facts = [
        f"{clients} clients" if clients and clients > 1 else "",
        f"task {config.get('task', '?')}",
        f"metric {book.metric}",
    ]
    facts.append(f"seed {seeds[0]}" if len(seeds) == 1 else f"{len(seeds)} seeds")
    data = config.get("data", {}).get("partition")
    return " · ".join(filter(None, [*facts, str(data) if data else ""]))


def _legend(book: Book) -> str:
    """Every series, to be hidden or shown in all pictures at once."""
    if len(book.series) < 2:
        return ""
    keys = "".join(
        f'<button type="button" data-toggle="{s.index}" aria-pressed="true">{swatch(s.css)} {escape(s.label)}</button>'
        for s in book.series
    )
    return f'<div class="legend" role="group" aria-label="methods shown in the pictures">{keys}</div>'
