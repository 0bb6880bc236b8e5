"""Runs as a report needs them: whatever a folder holds, finished or not, whole or cut off."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from fedloom import tasks
from fedloom.comparison.grid import setting
from fedloom.comparison.record import FILE, Comparison, load_comparison
from fedloom.errors import UserError
from fedloom.runs.result import Result
from fedloom.runs.run_folder import CLIENTS, CURVES, DATA, METRICS, RUN, read_clients, read_config, read_curves
from fedloom.spec import text_form
from fedloom.store.codec import read, unpack

Table = dict[str, Any]
Source = str | Path | Result | Comparison

DEPTH = 3
"""Levels below a folder in which runs are looked for."""


@dataclass(eq=False)
class RunData:
    """One run, as far as it got.

    Args:
        config: its resolved configuration.
        history: its rounds.
        rows: the table of clients; of an unfinished run what its last evaluation said.
        curves: ``{"round": ..., "clients": {id: metric}}`` of each evaluation.
        sketch: who has what in outline; empty where that is not known.
        path: its folder.
        name: what a comparison calls its method.
        setting: the swept values of a comparison.
        finished: whether it came to its end.
        notes: what a reader should know.
    """

    config: Table
    history: list[Table]
    rows: list[Table] = field(default_factory=list)
    curves: list[Table] = field(default_factory=list)
    sketch: Table = field(default_factory=dict)
    path: Path | None = None
    name: str = ""
    setting: str = ""
    finished: bool = True
    notes: tuple[str, ...] = ()

    @property
    def method(self) -> str:
        """The method in short: ``fedavg`` for ``fedavg()``."""
        return self.name or str(self.config.get("method", "run")).replace("()", "")

    @property
    def mode(self) -> str:
        """Centralised, federated or hybrid."""
        return str(self.config.get("mode", "federated"))

    @property
    def seed(self) -> int:
        """The run's seed."""
        return int(self.config.get("seed", 0))

    @property
    def primary(self) -> str:
        """The metric that counts."""
        return str(self.config.get("resolved", {}).get("primary", "loss"))

    @property
    def sign(self) -> float:
        """1 where more is better, -1 where less is."""
        return 1.0 if self.config.get("resolved", {}).get("higher_is_better", False) else -1.0

    @cached_property
    def data(self) -> str:
        """Two runs on the same rows of the same clients have the same text here, whatever each was told of them."""
        known = [self.sketch.get("clients"), self.sketch.get("points")] if self.sketch else self.config.get("data", {})
        return hashlib.sha256(json.dumps(known, sort_keys=True, default=str).encode()).hexdigest()

    @cached_property
    def last(self) -> Table:
        """The last round that was evaluated; empty where none was."""
        return next((r for r in reversed(self.history) if r.get(self.primary) is not None), {})

    @cached_property
    def values(self) -> dict[str, float]:
        """The metric of each client's own model at the end, of clients that took part."""
        p = self.primary
        return {r["client"]: float(r[p]) for r in self.rows if _is_number(r.get(p)) and not r.get("new")}

    def total(self, key: str) -> float:
        """The sum of a number over the rounds."""
        return float(sum(r[key] for r in self.history if _is_number(r.get(key))))

    @cached_property
    def prototypes(self) -> dict[str, Tensor]:
        """The classes' prototypes that the server holds at the end: classes x features by owner, unknown classes as NaN."""
        if self.path is None:
            return {}
        try:
            latest = read(self.path / "checkpoint" / "LATEST").decode().split()[0]
            place = self.path / "checkpoint" / Path(latest).name / "server.safetensors"
            memory = unpack(read(place), torch.device("cpu"))["memory"]
        except (UserError, SafetensorError, LookupError, TypeError, ValueError):
            return {}
        found = {}
        for owner, kept in memory.items():
            mean, known = kept.get("mean"), kept.get("known")
            if isinstance(mean, Tensor) and isinstance(known, Tensor) and mean.dim() == 2 and len(mean) == len(known):
                found[str(owner)] = torch.where(known.bool()[:, None], mean.double(), torch.nan)
        return found

    @cached_property
    def pictures(self) -> list[Path]:
        """Pictures of dense prediction, one per client."""
        return [] if self.path is None else sorted((self.path / "pictures").glob("*.png"))


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def collect(sources: Iterable[Source]) -> tuple[list[RunData], list[Comparison], list[str]]:
    """The runs behind folders, results and comparisons; the comparisons; and what could not be read.

    Raises:
        UserError: a source that holds no run, or nothing but runs without a round.
    """
    runs: list[RunData] = []
    made: list[Comparison] = []
    notes: list[str] = []
    for source in sources:
        if isinstance(source, Result):
            runs.append(of_result(source))
            continue
        comparison = source if isinstance(source, Comparison) else _comparison(Path(source))
        if comparison is not None:
            made.append(comparison)
            waiting = [c for c in comparison.cells if c.state == "waiting"]
            if waiting:
                whose = ", ".join(dict.fromkeys(c.method for c in waiting))
                notes.append(f"{len(waiting)} of {len(comparison.cells)} runs have not begun: {whose}")
            for cell in comparison.cells:
                where = " ".join(filter(None, (cell.method, cell.setting, f"seed {cell.seed}")))
                if cell.failure:
                    notes.append(f"{where} failed: {cell.failure}")
                if (cell.path / RUN).is_file():
                    runs += _tried(cell.path, notes, name=cell.method, setting=_setting(cell.options))
            continue
        assert not isinstance(source, Comparison)
        place = Path(source)
        if (place / RUN).is_file():
            runs.append(of_folder(place))
        elif (place / "experiment.toml").is_file():
            runs += deployed(place)
        else:
            runs += [run for path in _below(place) for run in _tried(path, notes)]
    unplayed = [r for r in runs if not r.history]
    notes += [f"{r.path or r.method} has no round yet" for r in unplayed]
    kept = [r for r in runs if r.history]
    if not kept:
        raise UserError(f"nothing to report: {'; '.join(notes) or 'no runs were given'}")
    metrics = {r.primary for r in kept}
    if len(metrics) > 1:
        shown = ", ".join(sorted(metrics))
        raise UserError(f"the runs are judged by different metrics ({shown}); give those of one task at a time")
    return kept, made, notes


def _setting(options: Mapping[str, Any]) -> str:
    """The swept values of a cell but its mode, which a report tells by itself."""
    return setting({k: v for k, v in options.items() if k != "mode"})


def _comparison(place: Path) -> Comparison | None:
    return load_comparison(place) if (place / FILE).is_file() else None


def _below(place: Path) -> list[Path]:
    """Run folders below a folder."""
    if not place.is_dir():
        raise UserError(
            f"{place} is not a folder; expected the folder of a run, of a comparison, or one that holds runs"
        )
    found: list[Path] = []
    level = [place]
    for _ in range(DEPTH):
        level = sorted(p for parent in level for p in parent.iterdir() if p.is_dir() and not p.name.startswith("."))
        found += [p for p in level if (p / RUN).is_file()]
        level = [p for p in level if p not in found]
    if not found:
        raise UserError(f"{place} holds no run ({RUN} is missing, and there is none in the folders below it)")
    return found


def _tried(path: Path, notes: list[str], name: str = "", setting: str = "") -> list[RunData]:
    """A run among others: one that cannot be read is left out and noted."""
    try:
        return [of_folder(path, name, setting)]
    except UserError as error:
        notes.append(str(error))
        return []


def of_result(result: Result) -> RunData:
    """A run that is at hand."""
    if result.path is not None and (result.path / RUN).is_file():
        return of_folder(result.path)
    rows = [c.row() for c in result.clients.values()]
    return RunData(result.config, list(result.history), rows, notes=result.notes)


def deployed(place: Path) -> list[RunData]:
    """The runs of an experiment of real sites."""
    try:
        from fedloom.flower.experiment import Experiment
        from fedloom.flower.server.records import read_experiment
        from fedloom.flower.site.site_store import folder_name
    except ImportError:
        raise UserError(f'{place} is of real sites; to read it: pip install "fedloom[flower]"') from None
    read_experiment(place)
    text = read(place / "experiment.toml").decode("utf-8", "replace")
    plan, shared = Experiment.parse(text), tomllib.loads(text)
    task = tasks.named(plan.task)
    resolved = {"primary": task.primary, "higher_is_better": task.higher_is_better, "clients": len(plan.sites)}
    runs = []
    for key, (method, seed) in plan.runs().items():
        config = {k: v for k, v in shared.items() if k not in ("methods", "seeds", "sites")}
        config |= {
            "method": text_form.method(method).text,
            "seed": seed,
            "resolved": {**resolved, "device": "the sites'"},
        }
        config["data"] = {"name": plan.name, "partition": "natural()", "seed": seed}
        if (place / folder_name(key)).is_dir():
            runs.append(of_folder(place / folder_name(key), config=config))
    return runs


def of_folder(path: Path, name: str = "", setting: str = "", config: Table | None = None) -> RunData:
    """A run from its folder, as far as it got.

    Raises:
        UserError: the configuration is missing or damaged.
    """
    config = read_config(path) if config is None else config
    history, cut = _rounds(path)
    notes = [str(n) for n in config.get("resolved", {}).get("notes", ())]
    if cut:
        notes.append(f"{METRICS} ends in the middle of a line; the rounds before it are shown")
    curves = read_curves(path) or [
        {"round": r["round"], "clients": {k: m.get(_primary(config)) for k, m in r["sites"].items()}}
        for r in history
        if isinstance(r.get("sites"), Mapping)
    ]
    finished = (path / CLIENTS).is_file()
    rows: list[Table] = []
    if finished:
        rows = read_clients(path)
    elif curves:
        last = curves[-1]
        known = {c["id"]: c for c in _sketch(path).get("clients", ())}
        for client, value in last["clients"].items():
            sizes = {f"n_{part}": known[client].get(part) for part in ("train", "test")} if client in known else {}
            rows.append({"client": client, **sizes, _primary(config): value})
    if not finished and history:
        planned = config.get("rounds", "?")
        notes.append(f"not finished: {len(history)} of {planned} rounds; clients are shown as of the last evaluation")
    return RunData(config, history, rows, curves, _sketch(path), path, name, setting, finished, tuple(notes))


def _primary(config: Mapping[str, Any]) -> str:
    return str(config.get("resolved", {}).get("primary", "loss"))


def _rounds(path: Path) -> tuple[list[Table], bool]:
    """The rounds up to the first line that is damaged, and whether there was one."""
    if not (path / METRICS).is_file():
        return [], False
    found: list[Table] = []
    for line in read(path / METRICS).decode("utf-8", "replace").splitlines():
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError:
            return found, True
        if not isinstance(record, dict) or not isinstance(record.get("round"), int):
            return found, True
        found.append(record)
    return found, False


def _sketch(path: Path) -> Table:
    if not (path / DATA).is_file():
        return {}
    try:
        found = json.loads(read(path / DATA))
    except ValueError:
        return {}
    return found if isinstance(found, dict) and found.get("clients") else {}


__all__ = ["CURVES", "RunData", "Source", "collect", "of_folder", "of_result"]
