"""Files that fedloom reads back carry a format number, and another number is refused in one line."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import fedloom as fl
from fedloom.runs import config_file
from fedloom.runs.run_folder import read_config
from tests.helpers import federation, mlp


def play(out: Path, rounds: int = 1, **options: Any) -> fl.Result:
    return fl.fit("fedper", mlp(), federation(), rounds=rounds, out=out, progress=False, **options)


def assert_refused(number: object, read: Callable[[], object]) -> None:
    """One line names both numbers and what to do."""
    line = rf"^.* has format {re.escape(str(number))}; expected format 1\. [A-Z][^\n]*\.$"
    with pytest.raises(fl.UserError, match=line):
        read()


@pytest.mark.parametrize("number", [2, 0, None])
def test_run_of_another_format_is_refused(tmp_path: Path, number: int | None) -> None:
    play(tmp_path)
    file = tmp_path / "run.toml"
    text = file.read_text()
    assert text.startswith("format = 1\n")
    assert "format" not in read_config(tmp_path)
    file.write_text(text.removeprefix("format = 1\n") if number is None else text.replace("= 1", f"= {number}", 1))
    assert_refused(number, lambda: fl.load_run(tmp_path))
    assert_refused(number, lambda: fl.report(tmp_path))
    assert_refused(number, lambda: play(tmp_path, resume=True))
    if number is not None:
        assert_refused(number, lambda: config_file.load(file))


@pytest.mark.parametrize("number", [2, None])
def test_checkpoint_of_another_format_is_refused(tmp_path: Path, number: int | None) -> None:
    play(tmp_path)
    (tmp_path / "clients.csv").unlink()  # the run looks unfinished
    latest = tmp_path / "checkpoint" / "LATEST"
    name = latest.read_text().split()[0]
    file = latest.parent / name / "state.json"
    state = json.loads(file.read_text())
    assert state.pop("format") == 1
    file.write_text(json.dumps(state if number is None else {**state, "format": number}))
    latest.write_text(f"{name} {hashlib.sha256(file.read_bytes()).hexdigest()}\n")
    assert_refused(number, lambda: play(tmp_path, resume=True))


@pytest.mark.parametrize("number", [2, None])
@pytest.mark.parametrize("name", ["shared", "clients/1"])
def test_model_of_another_format_is_refused(tmp_path: Path, name: str, number: int | None) -> None:
    play(tmp_path)
    file = tmp_path / "models" / f"{name}.safetensors"
    with safe_open(file, "pt") as model:
        assert model.metadata() == {"fedloom_format": "1"}
    save_file(load_file(file), file, None if number is None else {"fedloom_format": str(number)})
    assert_refused(number, lambda: fl.load_run(tmp_path, model=mlp()).model("1"))
