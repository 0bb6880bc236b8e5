"""A run's folder: configuration, metrics, checkpoints, and at the end clients and models."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from fedloom.errors import UserError
from fedloom.store import atomic
from fedloom.store.checkpoint import Checkpoints, Snapshot
from fedloom.store.client_store import ClientStore
from fedloom.store.codec import read
from fedloom.store.format_number import FORMAT, check_format

Table = dict[str, Any]
RUN, METRICS, CLIENTS, MODELS = "run.toml", "metrics.jsonl", "clients.csv", "models"
CURVES, DATA = "curves.jsonl", "data.json"

_SHARE = 0.1  # of a run's time that checkpoints may take


def amend(resolved: Table, changes: Table) -> None:
    """Changes the plan of what was resolved, and the engine that is named beside it."""
    resolved["plan"] |= changes
    resolved["engine"] = changes.get("engine", resolved["engine"])


class RunFolder:
    """The folder of one run, held by a lock while the run goes on.

    Args:
        path: the folder; it is made if need be.
        resume: go on with what is there; without, the folder must be empty.
    """

    def __init__(self, path: str | Path, *, resume: bool = False) -> None:
        self.path = Path(path)
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"{self.path} is not a folder; choose another one with --out")
        with atomic.writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        self._lock = atomic.Lock(self.path)
        try:
            inside = [p.name for p in self.path.iterdir()]
            if inside and not resume:
                raise UserError(f"{self.path} is not empty; choose another folder, or go on with --resume")
            if inside and RUN not in inside and any(not n.startswith(".") for n in inside):
                raise UserError(f"{self.path} holds no run ({RUN} is missing); choose another folder")
        except UserError:
            self._lock.release()
            raise
        self._checkpoints = Checkpoints(self.path / "checkpoint")
        self._written, self._cost, self._length = 0.0, 0.0, 0

    @property
    def begun(self) -> bool:
        """Whether a run was begun here."""
        return (self.path / RUN).exists()

    @property
    def finished(self) -> bool:
        """Whether the run is complete: the table of clients is written last."""
        return (self.path / CLIENTS).exists()

    def close(self) -> None:
        """Gives the folder back."""
        self._lock.release()

    # Configuration.

    def config(self) -> Table:
        """The configuration that the run was begun with."""
        return read_config(self.path)

    def begin(self, config: Table) -> None:
        """Writes the configuration and the format number."""
        import tomli_w  # only a run with a folder needs it

        atomic.write(self.path / RUN, tomli_w.dumps({"format": FORMAT, **config}).encode())

    def describe(self, sketch: Callable[[], Mapping[str, Any]]) -> None:
        """Writes who has what in outline, unless that is there already."""
        if not (self.path / DATA).exists():
            atomic.write(self.path / DATA, json.dumps(finite(sketch()), allow_nan=False).encode())

    def amend(self, changes: Table) -> None:
        """Changes what was resolved, under ``[resolved.plan]``."""
        table = self.config()
        amend(table["resolved"], changes)
        self.begin(table)

    def check_same(self, config: Table) -> None:
        """Refuses to go on with another configuration, naming the keys that differ."""
        old, new = flat(self.config()), flat(config)
        free = ("resolved.", "loggers")  # may change when a run goes on
        keys = [k for k in {**old, **new} if not k.startswith(free) and old.get(k) != new.get(k)]
        if keys:
            shown = ", ".join(f"{k} was {old.get(k, 'not given')!r}, now {new.get(k, 'not given')!r}" for k in keys[:5])
            raise UserError(f"{self.path} holds a run of another configuration: {shown}; choose another folder")

    # Rounds.

    def clients(self, device: torch.device) -> ClientStore:
        """Where a run that begins puts what its clients keep."""
        store = self._checkpoints.store
        store.device = device
        return store

    def restore(self, device: torch.device) -> tuple[Snapshot, list[Table]] | None:
        """The state after the last checkpoint and the rounds before it; what came later is cut off."""
        found = self._checkpoints.load(device)
        metrics = self.path / METRICS
        if found is None:
            atomic.remove(metrics)
            atomic.remove(self.path / CURVES)
            return None
        snapshot, length = found
        if not metrics.exists() or metrics.stat().st_size < length:
            raise UserError(f"{metrics} is shorter than the checkpoint says; start again in another folder")
        with atomic.writing(metrics):
            os.truncate(metrics, length)
        self._length = length
        kept = [line for line in read_curves(self.path) if line["round"] <= snapshot.server.round]
        atomic.write(self.path / CURVES, "".join(json.dumps(line) + "\n" for line in kept).encode())
        return snapshot, read_metrics(self.path)

    def append(self, record: Mapping[str, Any], clients: Mapping[str, float | None] | None = None) -> None:
        """Adds a round to ``metrics.jsonl``, and what was measured at each client to ``curves.jsonl``."""
        if clients:
            values = {k: None if v is None else float(f"{v:.6g}") for k, v in clients.items()}
            text = json.dumps(finite({"round": record["round"], "clients": values}), allow_nan=False) + "\n"
            with atomic.writing(self.path / CURVES), open(self.path / CURVES, "ab") as file:
                file.write(text.encode())
        line = (json.dumps(finite(record), allow_nan=False) + "\n").encode()
        metrics = self.path / METRICS
        with atomic.writing(metrics):
            try:
                with open(metrics, "ab") as file:
                    file.write(line)
            except OSError:
                if metrics.exists():
                    os.truncate(metrics, self._length)
                raise
        self._length += len(line)

    def checkpoint(self, snapshot: Snapshot, *, last: bool) -> None:
        """Writes a checkpoint, unless checkpoints would then take more than a tenth of the run's time."""
        now = time.monotonic()
        if not last and self._written and now - self._written < self._cost / _SHARE:
            return
        metrics = self.path / METRICS
        with atomic.writing(metrics), open(metrics, "ab") as file:
            os.fsync(file.fileno())
        self._checkpoints.save(snapshot, self._length)
        self._written = time.monotonic()
        self._cost = self._written - now

    # The end.

    def finish(self, rows: list[Table], files: Iterable[tuple[str, bytes]]) -> None:
        """Writes models and clients; the table of clients comes last and says that the run is complete."""
        temporary = atomic.fresh(self.path / f".{MODELS}.tmp")
        try:
            for name, data in files:
                (temporary / name).parent.mkdir(exist_ok=True)
                atomic.write(temporary / name, data)
            atomic.swap(temporary, self.path / MODELS)
        except UserError:
            atomic.remove(temporary)
            raise
        text = io.StringIO()
        table = csv.DictWriter(text, list(dict.fromkeys(k for row in rows for k in row)), lineterminator="\n")
        table.writeheader()
        table.writerows([{k: "" if v is None else v for k, v in row.items()} for row in rows])
        atomic.write(self.path / CLIENTS, text.getvalue().encode())


def finite(value: Any) -> Any:
    """A record as strict JSON: numbers that are not finite become null."""
    if isinstance(value, Mapping):
        return {str(k): finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    if isinstance(value, torch.Tensor):
        return finite(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value


def flat(table: Mapping[str, Any], prefix: str = "") -> Table:
    """A nested table with dotted keys.

    Example:
        >>> flat({"rounds": 5, "data": {"name": "digits"}})
        {'rounds': 5, 'data.name': 'digits'}
    """
    found: Table = {}
    for key, value in table.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


def read_config(path: Path) -> Table:
    """Load ``run.toml`` of a folder, without its format number.

    Raises:
        UserError: it is missing, damaged or of another format.
    """
    if not (path / RUN).is_file():
        raise UserError(f"{path} holds no run ({RUN} is missing)")
    try:
        table = tomllib.loads(read(path / RUN).decode())
    except ValueError as error:
        raise UserError(f"{path / RUN} is damaged: {error}") from None
    check_format(path / RUN, table.pop("format", None), "Run it again in another folder.")
    return table


def read_metrics(path: Path) -> list[Table]:
    """``metrics.jsonl`` of a folder."""
    if not (path / METRICS).exists():
        return []
    try:
        return [json.loads(line) for line in read(path / METRICS).decode().splitlines() if line.strip()]
    except ValueError as error:
        raise UserError(f"{path / METRICS} is damaged: {error}") from None


def read_curves(path: Path) -> list[Table]:
    """``curves.jsonl`` of a folder: ``round`` and the primary metric by client; a line that was cut off is left out."""
    if not (path / CURVES).exists():
        return []
    found = []
    for line in read(path / CURVES).decode("utf-8", "replace").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return [line for line in found if isinstance(line, dict) and {"round", "clients"} <= set(line)]


def read_clients(path: Path) -> list[Table]:
    """``clients.csv`` of a folder, with numbers as numbers."""
    if not (path / CLIENTS).exists():
        raise UserError(f"the run in {path} is not finished; go on with --resume")
    rows = list(csv.DictReader(io.StringIO(read(path / CLIENTS).decode())))
    return [{k: v if k == "client" else _number(v) for k, v in row.items()} for row in rows]


def _number(text: str) -> float | int | str | None:
    if text == "":
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
