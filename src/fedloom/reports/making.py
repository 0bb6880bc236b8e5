"""``fl.report``: runs in, one HTML file out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from fedloom.comparison.record import Comparison
from fedloom.errors import UserError
from fedloom.reports.book import Book
from fedloom.reports.page import page
from fedloom.reports.reading import Source, collect
from fedloom.result import Result
from fedloom.store import disk

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
        with disk.writing(target.parent):
            target.parent.mkdir(parents=True, exist_ok=True)
    disk.write(target, text.encode())


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
