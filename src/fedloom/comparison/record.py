"""What a comparison is once it is made: its cells, from its folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from torch import nn

from fedloom import tasks
from fedloom.comparison.arguments import model_for
from fedloom.comparison.grid import plain, setting
from fedloom.comparison.sheets import Sheet
from fedloom.errors import UserError
from fedloom.result import Result
from fedloom.store import disk, load_run
from fedloom.store.folder import CLIENTS, RUN, read_clients, read_config, read_metrics
from fedloom.store.packing import read
from fedloom.values import FORMAT, check_format

FILE, RUNS = "comparison.json", "runs"

State = Literal["waiting", "unfinished", "done", "failed"]
Given = nn.Module | Callable[[], nn.Module] | None


@dataclass(eq=False)
class Cell:
    """One run of a comparison.

    Args:
        method: the label of its method.
        seed: its seed.
        options: its swept values by dotted key, such as ``{"data.alpha": 0.1}``; empty where nothing is swept.
        path: its run folder (there once it has begun).
        failure: why it failed; empty unless it did.
        model: a module or what makes one, where the model was given in Python.
    """

    method: str
    seed: int
    options: dict[str, Any]
    path: Path
    failure: str = ""
    model: Given = field(default=None, repr=False)

    @property
    def setting(self) -> str:
        """The swept values in one line, such as ``data.alpha=0.1``; empty where nothing is swept."""
        return setting(self.options)

    @property
    def state(self) -> State:
        """Where it stands: waiting, unfinished (begun, to be resumed), done or failed."""
        if (self.path / CLIENTS).is_file():
            return "done"
        if self.failure:
            return "failed"
        return "unfinished" if (self.path / RUN).is_file() else "waiting"

    @cached_property
    def result(self) -> Result:
        """The finished run, as ``fl.load_run`` gives it.

        Raises:
            UserError: it is not done.
        """
        if self.state != "done":
            why = f": {self.failure}" if self.failure else ""
            raise UserError(f"the run of {self.method!r}, seed {self.seed}, is {self.state}{why}")
        return load_run(self.path, model=model_for(self.model, self.options))

    @property
    def history(self) -> list[dict[str, Any]]:
        """Its rounds so far, also of a run that failed or is not finished."""
        return self.result.history if self.state == "done" else read_metrics(self.path)

    @property
    def config(self) -> dict[str, Any]:
        """Its resolved configuration; empty before it has begun."""
        return read_config(self.path) if (self.path / RUN).is_file() else {}

    @property
    def clients(self) -> list[dict[str, Any]]:
        """Rows of its ``clients.csv``; none before it is done."""
        return read_clients(self.path) if self.state == "done" else []


@dataclass(eq=False)
class Comparison:
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

    path: Path
    methods: dict[str, str]
    seeds: tuple[int, ...]
    sweep: dict[str, list[Any]]
    baseline: str
    cells: list[Cell]
    options: dict[str, Any] = field(default_factory=dict)
    target: float | None = None

    @property
    def settings(self) -> list[str]:
        """Every combination of swept values in one line each; one empty line where nothing is swept."""
        return list(dict.fromkeys(c.setting for c in self.cells))

    def of(self, method: str | None = None, setting: str | None = None, seed: int | None = None) -> list[Cell]:
        """The cells of a method, a setting, a seed, or of several of these."""
        if method is not None and method not in self.methods:
            raise UserError(f"no method {method!r} in this comparison; there are {', '.join(self.methods)}")
        return [
            c
            for c in self.cells
            if method in (None, c.method) and setting in (None, c.setting) and seed in (None, c.seed)
        ]

    @property
    def failed(self) -> list[Cell]:
        """The cells that failed; each says why in ``.failure``."""
        return [c for c in self.cells if c.state == "failed"]

    @property
    def done(self) -> list[Cell]:
        """The cells that are finished."""
        return [c for c in self.cells if c.state == "done"]

    @cached_property
    def metric(self) -> str:
        """The primary metric of the runs."""
        return str(self._resolved("primary", tasks.named(str(self.options.get("task", "classification"))).primary))

    @cached_property
    def higher_is_better(self) -> bool:
        """Its direction."""
        return bool(self._resolved("higher_is_better", True))

    def _resolved(self, key: str, otherwise: Any) -> Any:
        for cell in self.cells:
            if (cell.path / RUN).is_file():
                return cell.config.get("resolved", {}).get(key, otherwise)
        return otherwise

    @property
    def tables(self) -> dict[str, Sheet]:
        """What the cells say together, as of now: ``summary``, ``costs``, ``overall``, ``gap`` (where the mode is swept), ``cells``, ``clients``.

        Each has ``rows`` of plain values and the forms ``csv()``, ``markdown()``, ``latex()`` and ``rich()``.
        """
        from fedloom.comparison.tables import tables  # the tables know what a comparison is

        return tables(self)

    def write(self) -> list[Path]:
        """Writes the tables into the folder ``tables``; returns the files."""
        from fedloom.comparison.tables import write

        return write(self, self.tables)

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
        with disk.writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        disk.write(self.path / FILE, text.encode())


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
