"""A comparison and its folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from fedloom.comparison.cell import Cell, Cells, Given
from fedloom.comparison.formats import Sheet
from fedloom.comparison.grid import plain
from fedloom.comparison.tables import make_tables, write_tables
from fedloom.errors import UserError
from fedloom.store import atomic
from fedloom.store.codec import read
from fedloom.store.format_number import FORMAT, check_format

FILE, RUNS = "comparison.json", "runs"


@dataclass(eq=False)
class Comparison(Cells):
    """Methods by seeds by swept options; made by ``fl.compare``, opened again by ``fl.load_comparison(folder)``.

    Its folder holds ``comparison.json``, ``tables/``, and ``runs/``, in which every cell is an ordinary run folder.

    Args:
        path: the folder.
        methods: text form of each method by label, in the order given.
        seeds: the seeds.
        sweep: the values of each swept option by dotted key, such as ``{"data.alpha": [0.1, 0.3]}``.
        baseline: label of the method that the others are held against.
        cells: all cells: settings outermost, then methods, then seeds.
        options: what all cells share, as plain values.
        target: value of the metric whose rounds and bytes are counted; None to take the baseline's own.

    Example:
        >>> import fedloom as fl
        >>> made = fl.compare("fedavg; fedper", model="mlp", data={"name": "digits", "clients": 3}, seeds=2, rounds=1, jobs=1, progress=False)
        >>> [(c.method, c.seed, c.state) for c in made.cells]
        [('fedavg', 0, 'done'), ('fedavg', 1, 'done'), ('fedper', 0, 'done'), ('fedper', 1, 'done')]
        >>> made.of("fedper")[0].result.task.primary
        'accuracy'
        >>> [(row["method"], row["value_n"]) for row in made.tables["summary"].rows]
        [('fedavg', 2), ('fedper', 2)]
    """

    @property
    def tables(self) -> dict[str, Sheet]:
        """What the cells say together, as of now: ``summary``, ``costs``, ``overall``, ``gap`` (where the mode is swept), ``cells``, ``clients``.

        Each has ``rows`` of plain values and the forms ``csv()``, ``markdown()``, ``latex()`` and ``rich()``.
        """
        return make_tables(self)

    def write(self) -> list[Path]:
        """Writes the tables into the folder ``tables``; returns the files."""
        return write_tables(self, self.tables)

    def __str__(self) -> str:
        console, made = Console(width=120), self.tables
        with console.capture() as captured:
            console.print(made["summary"].rich(), made["costs"].rich())
        return captured.get().rstrip()

    def save(self) -> None:
        """Writes ``comparison.json``."""
        cells = [
            {"method": c.method, "seed": c.seed, "options": _plain(c.options), "folder": f"{RUNS}/{c.path.name}"}
            | ({"failure": c.failure} if c.failure else {})
            for c in self.cells
        ]
        facts = {
            "format": FORMAT,
            "methods": self.methods,
            "seeds": list(self.seeds),
            "sweep": {k: [plain(v) for v in values] for k, values in self.sweep.items()},
            "baseline": self.baseline,
            "target": self.target,
            "options": self.options,
            "cells": cells,
        }
        text = json.dumps(facts, indent=1)
        with atomic.writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        atomic.write(self.path / FILE, text.encode())


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    return {k: plain(v) for k, v in options.items()}


def load_comparison(path: str | Path, model: Given = None) -> Comparison:
    """A comparison from its folder, also one that is not finished.

    Args:
        path: the folder.
        model: as for ``fl.load_run``: needed for the models of runs whose model was given in Python.
    """
    place = Path(path)
    facts = read_facts(place)
    try:
        cells = [
            Cell(c["method"], c["seed"], c["options"], place / c["folder"], c.get("failure", ""), model)
            for c in facts["cells"]
        ]
        return Comparison(
            place,
            dict(facts["methods"]),
            tuple(facts["seeds"]),
            dict(facts["sweep"]),
            facts["baseline"],
            cells,
            dict(facts["options"]),
            facts["target"],
        )
    except (KeyError, TypeError) as error:
        raise UserError(f"{place / FILE} is damaged: {error!r}") from None


def read_facts(place: Path) -> Mapping[str, Any]:
    """Load ``comparison.json`` of a folder.

    Raises:
        UserError: it is missing, damaged or of another format.
    """
    if not (place / FILE).is_file():
        raise UserError(f"{place} holds no comparison ({FILE} is missing)")
    try:
        facts = json.loads(read(place / FILE))
    except ValueError as error:
        raise UserError(f"{place / FILE} is damaged: {error}") from None
    if not isinstance(facts, dict):
        raise UserError(f"{place / FILE} is damaged: it holds no table")
    check_format(place / FILE, facts.get("format"), "Make the comparison again in another folder.")
    return facts
