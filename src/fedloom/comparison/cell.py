"""The cells of a comparison: one run for each method, seed and setting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from torch import nn

from fedloom import tasks
from fedloom.comparison.arguments import model_for
from fedloom.comparison.grid import setting
from fedloom.errors import UserError
from fedloom.runs.loading import load_run
from fedloom.runs.result import Result
from fedloom.runs.run_folder import CLIENTS, RUN, read_clients, read_config, read_metrics

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
class Cells:
    """The cells of a comparison with their methods, seeds and options.

    The fields are those of :class:`fedloom.Comparison`.
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
