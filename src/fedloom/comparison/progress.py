"""What a person sees while a comparison goes on: a live table on a terminal, a line per cell elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from fedloom.comparison.cell import Cell
from fedloom.comparison.record import Comparison

_REST = 0.2
"""Seconds between two looks at the table: it asks the disk where every cell stands."""


class Board:
    """Hears of the cells that are played, keeps the record, and shows where they stand.

    Args:
        comparison: the comparison; what failed is written into its record.
        playing: the cells that are played now.
        rounds: rounds of a run.
        jobs: cells at once.
        shown: whether anything is shown.
    """

    def __init__(self, comparison: Comparison, playing: Sequence[Cell], rounds: int, jobs: int, shown: bool) -> None:
        self.comparison, self.playing, self.rounds, self.jobs = comparison, playing, rounds, jobs
        self._console = Console(stderr=True, quiet=not shown)
        self._running: dict[int, tuple[int, float | None, float]] = {}
        self._values = {id(c): value_of(c) for c in comparison.cells}
        self._ended, self._began, self._shown = 0, time.monotonic(), 0.0
        terminal = shown and self._console.is_terminal
        self._live = Live(console=self._console, refresh_per_second=4, transient=True) if terminal else None

    def __enter__(self) -> Board:
        if self._live is not None:
            self._live.start()
            self._show()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    # What happens.

    def begun(self, i: int) -> None:
        """A cell begins."""
        self._running[i] = (0, None, time.monotonic())
        self._show()

    def heard(self, i: int, number: int, value: float | None) -> None:
        """A cell has played a round."""
        _, before, since = self._running[i]
        self._running[i] = (number, before if value is None else value, since)
        self._show()

    def ended(self, i: int, failure: str) -> None:
        """A cell is finished, or failed."""
        cell, (_, _, since) = self.playing[i], self._running.pop(i)
        cell.failure = failure
        self._ended += 1
        self._values[id(cell)] = value = value_of(cell)
        self.comparison.save()
        if self._live is None:
            where = ", ".join(w for w in (cell.method, cell.setting, f"seed {cell.seed}") if w)
            said = f"failed: {failure}" if failure else f"{self.comparison.metric} {number(value)}"
            spent = time.monotonic() - since
            line = f"{self._ended}/{len(self.playing)}  {where}: {said}  ({spent:.1f} s)"
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)
        self._show()

    # What is shown.

    def _show(self) -> None:
        if self._live is not None and time.monotonic() - self._shown > _REST:
            self._live.update(self.table())
            self._shown = time.monotonic()

    def table(self) -> Table:
        """Where every method stands in every setting."""
        spent, left = time.monotonic() - self._began, len(self.playing) - self._ended
        title = f"{self._ended} of {len(self.playing)} runs, {self.jobs} at once"
        if self._ended and left:
            title += f", about {spent / self._ended * left / 60:.0f} min left"
        table = Table(title=title, title_justify="left")
        table.add_column("method")
        if self.comparison.sweep:
            table.add_column("setting")
        table.add_column("done", justify="right")
        table.add_column(self.comparison.metric, justify="right")
        table.add_column("now")
        running = {id(self.playing[i]): facts for i, facts in self._running.items()}
        for setting in self.comparison.settings:
            for method in self.comparison.methods:
                cells = self.comparison.of(method, setting)
                table.add_row(*self._row(method, setting, cells, running))
        return table

    def _row(self, method: str, setting: str, cells: Sequence[Cell], running: dict[int, Any]) -> list[str]:
        values = [v for c in cells if (v := self._values[id(c)]) is not None]
        failed = sum(bool(c.failure) for c in cells)
        now = [
            f"seed {c.seed}: {running[id(c)][0]}/{self.rounds}"
            + ("" if running[id(c)][1] is None else f" {running[id(c)][1]:.3f}")
            for c in cells
            if id(c) in running
        ]
        said = [*now, *([f"{failed} failed"] if failed else [])]
        done = f"{sum(c.state == 'done' for c in cells)}/{len(cells)}"
        mean = number(sum(values) / len(values) if values else None)
        return [method, *([setting] if self.comparison.sweep else []), done, mean, ", ".join(said)]


def value_of(cell: Cell) -> float | None:
    """The primary metric of a finished cell: mean over clients, at the end."""
    return cell.result.summary().mean if cell.state == "done" else None


def number(value: float | None) -> str:
    """A value in a table."""
    return "-" if value is None else f"{value:.4f}"
