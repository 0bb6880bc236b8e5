"""Tables: as CSV with every number, and as Markdown, LaTeX or on a terminal for people."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

Row = Mapping[str, Any]

SETTING = "setting"
"""Head of the column that tells settings apart."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column for people.

    Args:
        head: its heading.
        show: a row's cell as text; empty where there is nothing.
        best: whether a row's cell is to be set in bold.
        left: whether it is text rather than a number.
    """

    head: str
    show: Callable[[Row], str]
    best: Callable[[Row], bool] = field(default=lambda row: False)
    left: bool = False


@dataclass(frozen=True, slots=True)
class Sheet:
    """A table.

    Args:
        name: of its files.
        title: what it shows, in one sentence.
        rows: all numbers, as plain values.
        columns: what people are shown of them.
        notes: sentences below it.
    """

    name: str
    title: str
    rows: list[dict[str, Any]]
    columns: tuple[Column, ...]
    notes: tuple[str, ...] = ()

    def shown(self) -> list[Column]:
        """The columns that have something to show."""
        return [c for c in self.columns if c.left or any(c.show(r) for r in self.rows)]

    def csv(self) -> str:
        """Every number, in full."""
        text = io.StringIO()
        keys = list(dict.fromkeys(k for row in self.rows for k in row))
        table = csv.DictWriter(text, keys, lineterminator="\n")
        table.writeheader()
        table.writerows([{k: "" if v is None else v for k, v in row.items()} for row in self.rows])
        return text.getvalue()

    def markdown(self) -> str:
        """For a README or a page."""
        columns = self.shown()
        lines = [f"{self.title}\n", "| " + " | ".join(_md(c.head) for c in columns) + " |"]
        lines.append("|" + "|".join("---" if c.left else "---:" for c in columns) + "|")
        for row in self.rows:
            cells = [_md(c.show(row)) for c in columns]
            bold = [f"**{t}**" if t and c.best(row) else t for t, c in zip(cells, columns, strict=True)]
            lines.append("| " + " | ".join(bold) + " |")
        return "\n".join([*lines, *(f"\n{_md(n)}" for n in self.notes)]) + "\n"

    def latex(self) -> str:
        """For a paper: needs the package booktabs."""
        columns = self.shown()
        lines = [r"\begin{table}", r"\centering", rf"\caption{{{_tex(self.title)}}}", rf"\label{{tab:{self.name}}}"]
        lines += [rf"\begin{{tabular}}{{{''.join('l' if c.left else 'r' for c in columns)}}}", r"\toprule"]
        lines += [" & ".join(_tex(c.head) for c in columns) + r" \\", r"\midrule"]
        for row in self.rows:
            cells = [_tex(c.show(row)) for c in columns]
            bold = [rf"\textbf{{{t}}}" if t and c.best(row) else t for t, c in zip(cells, columns, strict=True)]
            lines.append(" & ".join(bold) + r" \\")
        lines += [r"\bottomrule", r"\end{tabular}"]
        lines += [rf"\par\small {_tex(' '.join(self.notes))}"] if self.notes else []
        return "\n".join([*lines, r"\end{table}"]) + "\n"

    def rich(self) -> Table:
        """For a terminal; settings become headings, so that the rest has room."""
        caption = "\n".join(self.notes)
        table = Table(
            title=self.title, title_justify="left", caption=caption, caption_justify="left", box=box.SIMPLE_HEAD
        )
        columns = [c for c in self.shown() if c.head != SETTING]
        for c in columns:
            table.add_column(
                c.head, justify="left" if c.left else "right", overflow="fold", min_width=12 if c.left else None
            )
        last = ""
        for row in self.rows:
            if row.get("setting", "") != last:
                last = row["setting"]
                table.add_section()
                table.add_row(Text(last, style="italic"))
            table.add_row(*(Text(c.show(row), style="bold" if c.best(row) else "") for c in columns))
        return table


_TEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"$<$",
    ">": r"$>$",
    "±": r"$\pm$",
    "−": r"$-$",
    "✓": r"$\checkmark$",
}


def _tex(text: str) -> str:
    return "".join(_TEX.get(c, c) for c in text)


def _md(text: str) -> str:
    return re.sub(r"([|*_<])", r"\\\1", text)


# Cells ------------------------------------------------------------------------------------------------------


def text(key: str) -> Callable[[Row], str]:
    """A value as it is."""
    return lambda row: "" if row[key] is None else str(row[key])


def value(key: str, digits: int = 4) -> Callable[[Row], str]:
    """A number."""
    return lambda row: "" if row[key] is None else f"{row[key]:.{digits}f}"


def spread(key: str, sign: bool = False) -> Callable[[Row], str]:
    """A mean and half its interval."""

    def show(row: Row) -> str:
        if row[key] is None:
            return ""
        mean = f"{row[key]:+.4f}".replace("-", "−") if sign else f"{row[key]:.4f}"
        return mean if row[f"{key}_high"] is None else f"{mean} ± {row[f'{key}_high'] - row[key]:.4f}"

    return show


def probability(key: str) -> Callable[[Row], str]:
    """A p value."""
    return lambda row: "" if row[key] is None else "<0.001" if row[key] < 0.001 else f"{row[key]:.3f}"


def size(key: str) -> Callable[[Row], str]:
    """Bytes, in MB."""

    def show(row: Row) -> str:
        if row[key] is None:
            return ""
        mega = row[key] / 1e6
        return f"{mega:.0f}" if mega >= 100 else f"{mega:.{max(0, 2 - math.floor(math.log10(mega)))}f}" if mega else "0"

    return show


def lowest(rows: Iterable[Row], key: str, group: Sequence[str], sign: float) -> Callable[[Row], bool]:
    """Whether a row is the best of its group in a column; ``sign`` is 1 where smaller is better, else -1."""
    least: dict[tuple[Any, ...], float] = {}
    for row in rows:
        if row[key] is not None:
            k = tuple(row[g] for g in group)
            least[k] = min(least.get(k, math.inf), sign * row[key])
    return lambda row: row[key] is not None and sign * row[key] == least[tuple(row[g] for g in group)]
