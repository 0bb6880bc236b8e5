"""The page: sections in a frame, with style and script inside; nothing is fetched from anywhere."""

from __future__ import annotations

from html import escape
from importlib.resources import files

from fedloom.reports.book import Book
from fedloom.reports.html import swatch
from fedloom.reports.sections import SECTIONS


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
