"""The command line, called in this process."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fedloom.cli import main


@dataclass(frozen=True)
class Outcome:
    """Exit status and what was printed."""

    status: int
    out: str
    err: str

    def mistake(self) -> str:
        """The line of a user's mistake: status 2, one line on stderr, nothing on stdout, no traceback."""
        assert self.status == 2, (self.status, self.err)
        lines = [line for line in self.err.splitlines() if not line.startswith("fedloom: warning")]
        assert len(lines) == 1, self.err
        assert "Traceback" not in self.err
        return lines[0]


Cli = Callable[..., Outcome]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    def call(*words: Any) -> Outcome:
        capsys.readouterr()
        # Warnings are shown, as in a process of its own; typer still uses names that click will remove.
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            warnings.simplefilter("ignore", DeprecationWarning)
            with pytest.raises(SystemExit) as leaving:
                main([str(w) for w in words])
        out, err = capsys.readouterr()
        assert isinstance(leaving.value.code, int)
        return Outcome(leaving.value.code, out, err)

    return call


CONFIG = """
method = "fedavg"
rounds = 2
[data]
name = "digits"
clients = 4
[model]
name = "mlp"
hidden = [8]
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(CONFIG)
    return path
