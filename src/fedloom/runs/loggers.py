"""Loggers: a run's numbers in TensorBoard or MLflow while it goes on. Neither is needed, and neither is imported unless asked for."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedloom.errors import UnknownName, UserError
from fedloom.rounds.logger import Logger, Record
from fedloom.runs.run_folder import flat
from fedloom.store import atomic


def numbers(record: Record, prefix: str = "") -> Iterator[tuple[str, float]]:
    """The finite numbers of a record, by name; those of a part of a method under the part's name.

    Example:
        >>> dict(numbers({"round": 2, "loss": 0.5, "lag": {"score": {"head": 3.0}}, "clients": ["a"], "f1": None}))
        {'loss': 0.5, 'lag/score/head': 3.0}
    """
    for key, value in record.items():
        if isinstance(value, Mapping):
            yield from numbers(value, f"{prefix}{key}/")
        elif (
            isinstance(value, (int, float)) and not isinstance(value, bool) and key != "round" and math.isfinite(value)
        ):
            yield f"{prefix}{key}", float(value)


class TensorBoard:
    """Writes event files for ``tensorboard --logdir``.

    Args:
        folder: where to; ``tensorboard`` in the run's folder without.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UserError('the logger tensorboard needs its package: pip install "fedloom[tensorboard]"') from None
        self._make: Callable[..., Any] = SummaryWriter
        self._folder = None if folder is None else Path(folder)
        self._writer: Any = None

    def open(self, config: Mapping[str, Any], folder: Path | None, played: int) -> None:
        """Rounds that a resumed run plays again are replaced."""
        if self._folder is None and folder is None:
            raise UserError("the logger tensorboard has no folder; give the run one with out='folder'")
        place = self._folder if self._folder is not None else Path(str(folder)) / "tensorboard"
        with atomic.writing(place):
            self._writer = self._make(str(place), purge_step=played + 1)
        if not played:
            told = "\n".join(f"    {k} = {v}" for k, v in flat(config).items() if not k.startswith("model.leaves."))
            self._writer.add_text("configuration", told)

    def log(self, record: Record) -> None:
        """A scalar per number."""
        for name, value in numbers(record):
            self._writer.add_scalar(name, value, int(record["round"]))
        self._writer.flush()

    def close(self, failed: bool) -> None:
        """Writes what is left."""
        if self._writer is not None:
            self._writer.close()


_RUN = "mlflow.txt"


class MLflow:
    """Sends numbers to MLflow: where to is MLflow's own business (``MLFLOW_TRACKING_URI``, ``MLFLOW_EXPERIMENT_NAME``).

    A run that is resumed goes on with its MLflow run, whose id is kept in the run's folder.
    """

    def __init__(self) -> None:
        try:
            from mlflow import MlflowClient
        except ImportError:
            raise UserError('the logger mlflow needs its package: pip install "fedloom[mlflow]"') from None
        self._client: Any = MlflowClient()
        self._run: str | None = None

    def open(self, config: Mapping[str, Any], folder: Path | None, played: int) -> None:
        """Begins an MLflow run with the whole configuration as its parameters, or finds the one of a resumed run."""
        note = None if folder is None else folder / _RUN
        if played and note is not None and note.is_file():
            self._run = note.read_text(encoding="utf-8").strip()
            return
        self._run = self._client.create_run(self._experiment(), run_name=str(config.get("method", "run"))).info.run_id
        if note is not None:
            atomic.write(note, f"{self._run}\n".encode())
        for key, value in flat(config).items():
            if not key.startswith(("model.leaves.", "resolved.")):
                self._client.log_param(self._run, key, str(value)[:500])

    def _experiment(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "fedloom")
        found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id) if found is not None else str(self._client.create_experiment(name))

    def log(self, record: Record) -> None:
        """A metric per number."""
        for name, value in numbers(record):
            self._client.log_metric(self._run, name, value, step=int(record["round"]))

    def close(self, failed: bool) -> None:
        """Ends the MLflow run."""
        if self._run is not None:
            self._client.set_terminated(self._run, "FAILED" if failed else "FINISHED")


LOGGERS: dict[str, Callable[[], Logger]] = {"tensorboard": TensorBoard, "mlflow": MLflow}


def named(given: Sequence[str | Logger]) -> list[Logger]:
    """Loggers from their names or from themselves; a package that is missing is found out before the run begins."""
    if isinstance(given, str):
        raise UserError(f"loggers={given!r}: expected a list, such as [{given!r}]")
    made = []
    for one in given:
        if isinstance(one, str):
            if one not in LOGGERS:
                raise UnknownName("logger", one, LOGGERS)
            made.append(LOGGERS[one]())
        else:
            made.append(one)
    return made


@contextlib.contextmanager
def opened(loggers: Sequence[Logger], config: Mapping[str, Any], folder: Path | None, played: int) -> Iterator[None]:
    """Loggers while a run goes on; all are closed, however it ends."""
    begun: list[Logger] = []
    failed = True
    try:
        for logger in loggers:
            logger.open(config, folder, played)
            begun.append(logger)
        yield
        failed = False
    finally:
        for logger in begun:
            logger.close(failed)
