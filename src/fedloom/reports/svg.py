"""Drawing: scales, axes and marks as plain SVG text, coloured by the page's style sheet so that light, dark and paper all work."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

CHARACTER = 6.1
"""Width of a character of the small type, in units of a drawing, on average."""


@dataclass(frozen=True, slots=True)
class Axis:
    """Numbers onto positions: ``[low, high]`` onto ``[start, end]``.

    Example:
        >>> Axis(0, 10, 100, 200).at(5)
        150.0
    """

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        """The position of a number."""
        span = self.high - self.low
        share = 0.5 if span == 0 else (value - self.low) / span
        return round(self.start + share * (self.end - self.start), 2)

    def ticks(self, wanted: int = 5) -> list[float]:
        """Round numbers inside the range."""
        return ticks(self.low, self.high, wanted)


def ticks(low: float, high: float, wanted: int = 5, *, whole: bool = False) -> list[float]:
    """Round numbers between two; only whole ones, if asked.

    Example:
        >>> ticks(0.0, 1.0), ticks(3.0, 3.0), ticks(1, 4, 6, whole=True)
        ([0.0, 0.2, 0.4, 0.6, 0.8, 1.0], [3.0], [1.0, 2.0, 3.0, 4.0])
    """
    if not high > low:
        return [low]
    rough = max((high - low) / max(1, wanted), 1.0 if whole else 0.0)
    base = 10.0 ** math.floor(math.log10(rough))
    step = next(m * base for m in ((1, 2, 5, 10) if whole else (1, 2, 2.5, 5, 10)) if m * base >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def spanned(values: Sequence[float], *, margin: float = 0.05, zero: bool = False) -> tuple[float, float]:
    """The range of some numbers with a margin; with zero in it, if asked."""
    there = [v for v in values if math.isfinite(v)]
    low, high = (min(there), max(there)) if there else (0.0, 1.0)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    room = (high - low) * margin or abs(high) * margin or 0.5
    return (low if zero and low == 0 else low - room), (high if zero and high == 0 else high + room)


def number(value: float | int | None, digits: int = 4) -> str:
    """A number for people.

    Example:
        >>> number(0.91234), number(1234567.0), number(None), number(2e-7)
        ('0.9123', '1,234,567', '–', '2e-07')
    """
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "–"
    if isinstance(value, int) or (float(value).is_integer() and abs(value) >= 1000):
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def marks(values: Sequence[float]) -> list[str]:
    """The numbers at an axis, with as many digits as tell them apart.

    Example:
        >>> marks([0.9996, 0.99965, 0.9997]), marks([0, 0.5, 1]), marks([0, 20000])
        (['0.99960', '0.99965', '0.99970'], ['0.0', '0.5', '1.0'], ['0', '20,000'])
    """
    for digits in range(7):
        said = [f"{v:,.{digits}f}" for v in values]
        if all(
            abs(float(t.replace(",", "")) - v) <= 1e-9 * max(abs(v), 1e-3) for t, v in zip(said, values, strict=True)
        ):
            return said
    return [number(v) for v in values]


def fixed(value: float | None) -> str:
    """A metric in a table: four digits behind the point, so that columns line up.

    Example:
        >>> fixed(0.9), fixed(1234.5), fixed(None)
        ('0.9000', '1,234', '–')
    """
    return f"{value:.4f}" if value is not None and abs(value) < 100 else number(value)


def scaled(most: float) -> tuple[float, str]:
    """The unit in which bytes up to so many are told, and its size.

    Example:
        >>> scaled(720), scaled(3e6)
        ((1.0, 'B'), (1000000.0, 'MB'))
    """
    return next(((f, u) for f, u in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if most >= f), (1.0, "B"))


def size(count: float) -> str:
    """Bytes for people.

    Example:
        >>> size(0), size(1500), size(2.5e9)
        ('0 B', '1.5 kB', '2.5 GB')
    """
    factor, unit = scaled(count)
    return f"{count / factor:.3g} {unit}"


def short(text: str, most: int) -> str:
    """A text cut to so many characters."""
    return text if len(text) <= most else text[: max(1, most - 1)] + "…"


@dataclass(slots=True)
class Drawing:
    """An SVG picture under way.

    Args:
        width: in its own units; the page scales it.
        height: likewise.
        label: what it shows, for those who do not see it.
        kind: a class for the style sheet and for scripts.
    """

    width: float
    height: float
    label: str
    kind: str = "chart"
    parts: list[str] = field(default_factory=list)
    data: Any = None

    def add(self, text: str) -> None:
        """Raw SVG."""
        self.parts.append(text)

    def line(self, x1: float, y1: float, x2: float, y2: float, css: str) -> None:
        """A straight line."""
        self.add(f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" class="{css}"/>')

    def path(self, points: Sequence[tuple[float, float]], css: str, more: str = "") -> None:
        """A polyline; a lone point is a dot."""
        if len(points) == 1:
            self.dot(*points[0], 3, "dot " + css.replace("line", ""), more=more)
        elif points:
            at = " ".join(f"{x:g},{y:g}" for x, y in points)
            self.add(f'<polyline points="{at}" class="{css}"{more}/>')

    def area(self, upper: Sequence[tuple[float, float]], lower: Sequence[tuple[float, float]], css: str) -> None:
        """The area between two lines."""
        if len(upper) > 1:
            at = " ".join(f"{x:g},{y:g}" for x, y in [*upper, *reversed(lower)])
            self.add(f'<polygon points="{at}" class="{css}"/>')

    def dot(self, x: float, y: float, r: float, css: str, tip: str = "", more: str = "") -> None:
        """A dot; the tip is shown when one points at it."""
        self.add(f'<circle cx="{x:g}" cy="{y:g}" r="{r:g}" class="{css}"{tipped(tip)}{more}/>')

    def rect(self, x: float, y: float, w: float, h: float, css: str, tip: str = "", more: str = "") -> None:
        """A rectangle."""
        w, h = max(round(w, 2), 0.0), max(round(h, 2), 0.0)
        self.add(
            f'<rect x="{round(x, 2):g}" y="{round(y, 2):g}" width="{w:g}" height="{h:g}" class="{css}"{tipped(tip)}{more}/>'
        )

    def text(self, x: float, y: float, text: str, css: str = "", anchor: str = "start", more: str = "") -> None:
        """A line of text."""
        self.add(f'<text x="{x:g}" y="{y:g}" class="{css}" text-anchor="{anchor}"{more}>{escape(text)}</text>')

    def begin(self, series: int | None = None, css: str = "") -> None:
        """Opens a group; the marks of one series can be hidden and shown together."""
        which = "" if series is None else f' data-s="{series}"'
        self.add(f'<g class="{css}"{which}>')

    def end(self) -> None:
        """Closes a group."""
        self.add("</g>")

    def x_axis(self, scale: Axis, y: float, title: str, *, whole: bool = False, wanted: int = 6) -> None:
        """An axis below; of whole numbers only, if asked."""
        at = ticks(scale.low, scale.high, wanted, whole=whole)
        self.line(scale.start, y, scale.end, y, "axis")
        for value, said in zip(at, marks(at), strict=True):
            self.text(scale.at(value), y + 15, said, "tick", "middle")
        self.text((scale.start + scale.end) / 2, y + 32, title, "label", "middle")

    def y_axis(self, scale: Axis, left: float, right: float, title: str, wanted: int = 5) -> None:
        """An axis on the left, with a grid across."""
        at = scale.ticks(wanted)
        for value, said in zip(at, marks(at), strict=True):
            y = scale.at(value)
            self.line(left, y, right, y, "rule")
            self.text(left - 6, y + 3.5, said, "tick", "end")
        self.text(left - 44, min(scale.start, scale.end) - 12, title, "label")

    def __str__(self) -> str:
        data = "" if self.data is None else f" data-chart='{escape(json.dumps(self.data, allow_nan=False))}'"
        return (
            f'<svg viewBox="0 0 {self.width:g} {self.height:g}" role="img" aria-label="{escape(self.label)}" '
            f'class="{self.kind}" style="max-width:{self.width * 1.25:g}px"{data}>{"".join(self.parts)}</svg>'
        )


def tipped(tip: str) -> str:
    """The attribute that holds a tip."""
    return f' data-tip="{escape(tip)}"' if tip else ""


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Positions near those wanted, at least a gap apart, so that labels do not lie on each other.

    Example:
        >>> spread([10, 11, 50], 12, 0, 100)
        [4.5, 16.5, 50.0]
    """
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    blocks: list[list[float]] = []  # [sum of wanted minus offset, count]
    for i in order:
        blocks.append([float(wanted[i]), 1])
        while len(blocks) > 1 and _end(blocks[-2], gap) + gap > _start(blocks[-1], gap) + 1e-9:
            top = blocks.pop()
            blocks[-1] = [
                (blocks[-1][0] * blocks[-1][1] + top[0] * top[1]) / (blocks[-1][1] + top[1]),
                blocks[-1][1] + top[1],
            ]
    placed: list[float] = []
    for centre, count in blocks:
        placed += [centre + (k - (count - 1) / 2) * gap for k in range(int(count))]
    shift = max(0.0, low - placed[0]) if placed else 0.0
    placed = [p + shift for p in placed]
    over = max(0.0, placed[-1] - high) if placed else 0.0
    found = [0.0] * len(wanted)
    for rank, i in enumerate(order):
        found[i] = placed[rank] - over
    return found


def _start(block: list[float], gap: float) -> float:
    return block[0] - (block[1] - 1) / 2 * gap


def _end(block: list[float], gap: float) -> float:
    return block[0] + (block[1] - 1) / 2 * gap
