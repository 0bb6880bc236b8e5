"""Tables of what is in a log: means and spreads over seeds, differences between runs of equal seed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

Line = dict[str, Any]


def by(lines: Iterable[Line], *keys: str) -> dict[tuple[Hashable, ...], list[Line]]:
    """Lines that agree in these entries of their case, in order of first appearance; failed runs are left out."""
    found: dict[tuple[Hashable, ...], list[Line]] = {}
    for line in lines:
        if "failed" not in line["found"]:
            found.setdefault(tuple(line["case"].get(k) for k in keys), []).append(line)
    return found


def values(lines: Iterable[Line], metric: str) -> dict[int, float]:
    """A metric by seed."""
    return {x["case"]["seed"]: x["found"][metric] for x in lines if x["found"].get(metric) is not None}


def spread(numbers: Iterable[float], scale: float = 100.0, digits: int = 2) -> str:
    """Mean, standard deviation over seeds, and their number where it is not 3.

    Example:
        >>> spread([0.5, 0.6, 0.7])
        '60.00 ± 10.00'
    """
    found = [scale * v for v in numbers]
    if not found:
        return "–"
    if len(found) == 1:
        return f"{found[0]:.{digits}f} (1 seed)"
    text = f"{statistics.mean(found):.{digits}f} ± {statistics.stdev(found):.{digits}f}"
    return text if len(found) == 3 else f"{text} ({len(found)})"


def difference(lines: Iterable[Line], base: Iterable[Line], metric: str) -> list[float]:
    """A metric minus that of the base, seed by seed."""
    ours, theirs = values(lines, metric), values(base, metric)
    return [ours[s] - theirs[s] for s in sorted(ours) if s in theirs]


def signed(numbers: Sequence[float], scale: float = 100.0, digits: int = 2) -> str:
    """A paired difference: mean, spread, and in how many seeds it is above 0.

    Example:
        >>> signed([0.01, 0.02, -0.01])
        '+0.67 ± 1.53 (2/3)'
    """
    if not numbers:
        return "–"
    found = [scale * v for v in numbers]
    wins = f"({sum(v > 0 for v in found)}/{len(found)})"
    middle = f"{statistics.mean(found):+.{digits}f}"
    return f"{middle} ± {statistics.stdev(found):.{digits}f} {wins}" if len(found) > 1 else f"{middle} {wins}"


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def metric_table(
    lines: Iterable[Line],
    keys: Sequence[str],
    columns: dict[str, str],
    published: Callable[[tuple[Hashable, ...]], str] | None = None,
    scale: float = 100.0,
) -> str:
    """One row per group of cases, one column per metric, and the published value."""
    groups = by(lines, *keys)
    head = [*keys, *columns, *(["published"] if published else [])]
    rows = []
    for key, group in groups.items():
        row = [str(k) for k in key]
        row += [spread(values(group, metric).values(), scale) for metric in columns.values()]
        rows.append(row + ([published(key)] if published else []))
    return markdown(head, rows)
