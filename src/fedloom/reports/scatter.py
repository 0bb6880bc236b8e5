"""Points in the plane, with names that do not lie on each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedloom.reports.svg import CHARACTER, Axis, Drawing, spanned

WIDTH = 560.0
"""Of a drawing that takes half of the page."""


@dataclass(slots=True)
class Dot:
    """A point of a scatter."""

    x: float
    y: float
    css: str
    tip: str
    r: float = 3.0
    text: str = ""
    index: int | None = None


def scatter(
    dots: Sequence[Dot],
    *,
    label: str,
    x_title: str,
    y_title: str,
    line: Sequence[tuple[float, float]] = (),
    bare: bool = False,
    height: float = 320.0,
    width: float = WIDTH,
) -> Drawing:
    """Points, with texts beside those that have one; without axes where their numbers say nothing."""
    drawing = Drawing(width, height, label, "chart scatter")
    left, top, bottom = (16.0, 14.0, height - 26) if bare else (52.0, 30.0, height - 40)
    x = Axis(*spanned([d.x for d in dots], margin=0.08), left, width - 16)
    y = Axis(*spanned([d.y for d in dots], margin=0.08), bottom, top)
    if bare:
        drawing.rect(left, top, width - 16 - left, bottom - top, "frame")
        drawing.text(width / 2, height - 8, x_title, "label", "middle")
        drawing.text(left + 6, top + 14, y_title, "label")
    else:
        drawing.y_axis(y, left, width - 16, y_title)
        drawing.x_axis(x, bottom, x_title)
    if line:
        drawing.path([(x.at(a), y.at(b)) for a, b in line], "front")
    for d in dots:
        drawing.begin(d.index)
        drawing.dot(x.at(d.x), y.at(d.y), d.r, f"dot {d.css}", d.tip)
        drawing.end()
    _names(drawing, [(x.at(d.x), y.at(d.y), d) for d in dots], (left, top, width - 4, bottom))
    return drawing


def _names(
    drawing: Drawing, placed: Sequence[tuple[float, float, Dot]], frame: tuple[float, float, float, float]
) -> None:
    """Texts beside their dots, where they cover neither each other nor another named dot, if there is such a place."""
    taken = [(x - d.r, y - d.r, x + d.r, y + d.r) for x, y, d in placed if d.text]
    for x, y, d in placed:
        if not d.text:
            continue
        wide, off = len(d.text) * CHARACTER, d.r + 3
        places = [
            (x + off, y + 3.5, "start"),
            (x - off, y + 3.5, "end"),
            (x, y - off - 2, "middle"),
            (x, y + off + 9, "middle"),
            (x + off, y - off, "start"),
            (x + off, y + off + 8, "start"),
            (x - off, y - off, "end"),
            (x - off, y + off + 8, "end"),
        ]
        boxes = [_box(place, wide) for place in places]
        costs = [_covered(box, taken, frame) for box in boxes]
        best = costs.index(min(costs))
        taken.append(boxes[best])
        at_x, at_y, anchor = places[best]
        drawing.begin(d.index)
        drawing.text(round(at_x, 1), round(at_y, 1), d.text, "name halo", anchor)
        drawing.end()


Box = tuple[float, float, float, float]


def _box(place: tuple[float, float, str], wide: float) -> Box:
    x, y, anchor = place
    start = x if anchor == "start" else x - wide if anchor == "end" else x - wide / 2
    return start, y - 9, start + wide, y + 3


def _covered(box: Box, taken: Sequence[Box], frame: Box) -> float:
    """How much of a box lies on others or outside of the frame."""
    total = 0.0
    for other in taken:
        w, h = min(box[2], other[2]) - max(box[0], other[0]), min(box[3], other[3]) - max(box[1], other[1])
        total += w * h if w > 0 and h > 0 else 0.0
    out = max(frame[0] - box[0], 0) + max(box[2] - frame[2], 0) + max(frame[1] - box[1], 0) + max(box[3] - frame[3], 0)
    return total + 20 * out
