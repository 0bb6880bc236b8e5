"""Small pieces of HTML."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from fedloom.reports.svg import Drawing


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page.

    Args:
        key: its anchor.
        title: its heading.
        body: its HTML.
    """

    key: str
    title: str
    body: str


def figure(drawing: Drawing, title: str, caption: str = "", *, wide: bool = False) -> str:
    """A drawing with its heading and a word on how to read it."""
    said = f"<p>{escape(caption)}</p>" if caption else ""
    css = ' class="wide"' if wide else ""
    return f"<figure{css}><figcaption><h3>{escape(title)}</h3>{said}</figcaption><div class='scroll'>{drawing}</div></figure>"


def grid(figures: Iterable[str], *, three: bool = False) -> str:
    """Figures side by side, two or three where the page has room."""
    return f"<div class='grid{' three' if three else ''}'>{''.join(figures)}</div>"


def table(
    heads: Sequence[str],
    rows: Iterable[Sequence[tuple[str, object]]],
    *,
    name: str,
    sortable: bool = True,
    css: str = "",
    marks: Sequence[str] = (),
) -> str:
    """A table whose columns sort; cells are what is shown and what is sorted by.

    Args:
        heads: of the columns.
        rows: cells ``(shown, value)``.
        name: what the table holds, for those who do not see it.
        sortable: whether its heads are buttons.
        css: more classes.
        marks: a class for each row, or nothing.
    """
    kind = f"{'sortable ' if sortable else ''}{css}".strip()
    head = "".join(
        f'<th scope="col"><button type="button">{escape(h)}</button></th>'
        if sortable
        else f'<th scope="col">{escape(h)}</th>'
        for h in heads
    )
    lines = []
    for i, row in enumerate(rows):
        cells = "".join(
            f'<td data-v="{escape("" if v is None else str(v))}"{_numeric(v)}>{shown}</td>' if k else _first(shown, v)
            for k, (shown, v) in enumerate(row)
        )
        mark = f' class="{marks[i]}"' if i < len(marks) and marks[i] else ""
        lines.append(f"<tr{mark}>{cells}</tr>")
    return (
        f"<div class='scroll'><table class='{kind}' aria-label='{escape(name)}'><thead><tr>{head}</tr></thead>"
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def _numeric(value: object) -> str:
    return ' class="n"' if value is None or isinstance(value, (int, float)) else ""


def _first(shown: str, value: object) -> str:
    return f'<th scope="row" data-v="{escape("" if value is None else str(value))}">{shown}</th>'


def swatch(css: str) -> str:
    """The colour of a series."""
    return f'<svg class="swatch" viewBox="0 0 18 10" aria-hidden="true"><line x1="0" y1="5" x2="18" y2="5" class="line {css}"/></svg>'
