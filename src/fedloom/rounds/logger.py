"""The interface of loggers: an object with three methods."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

Record = Mapping[str, Any]


class Logger(Protocol):
    """What is told of a run. Any object with these three methods will do."""

    def open(self, config: Mapping[str, Any], folder: Path | None, played: int) -> None:
        """The run begins, or goes on after so many rounds."""

    def log(self, record: Record) -> None:
        """A round is over; the fields are those of ``metrics.jsonl``."""

    def close(self, failed: bool) -> None:
        """The run is over, or has failed."""
