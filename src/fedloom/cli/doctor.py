"""``fedloom doctor``: check this installation."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import typer

from fedloom import data, devices
from fedloom.api import fit
from fedloom.cli.check import AsJson
from fedloom.data.sets.download import data_folders
from fedloom.errors import UserError
from fedloom.runs.loading import load_run
from fedloom.version import __version__


def doctor(as_json: AsJson = False) -> int:
    """Look at this installation and train for a second; exit status 1 where something does not work."""
    facts: dict[str, Any] = {
        "fedloom": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": platform.platform(),
        "processors": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": devices.gpu_name() or "none",
    }
    for package in ("numpy", "safetensors", "typer", "rich", "tomli_w", "matplotlib", "PIL", "flwr"):
        facts[package] = _version({"PIL": "pillow", "tomli_w": "tomli-w"}.get(package, package))
    problems = _data_facts(facts) + _disk_facts(facts) + _trial(facts)
    if as_json:
        typer.echo(json.dumps({**facts, "problems": problems}, indent=2))
        return 1 if problems else 0
    for key, value in facts.items():
        typer.echo(f"{key:<18} {value}")
    for problem in problems:
        typer.echo(f"problem: {problem}")
    typer.echo("all is well" if not problems else f"{len(problems)} problem(s)")
    return 1 if problems else 0


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _data_facts(facts: dict[str, Any]) -> list[str]:
    for number, place in enumerate(data_folders(), start=1):
        facts[f"data folder {number}"] = f"{place} ({'there' if place.is_dir() else 'not there yet'})"
    return []


def _disk_facts(facts: dict[str, Any]) -> list[str]:
    free = shutil.disk_usage(Path.cwd()).free
    facts["free disk space"] = f"{free / 1e9:.1f} GB"
    return [] if free > 1e8 else ["less than 100 MB are free on this disk"]


def _trial(facts: dict[str, Any]) -> list[str]:
    """Two rounds on the digits, written and read."""
    begun = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory() as folder:
            federation = data.load("digits").partition(data.dirichlet(0.3), clients=4, seed=0)
            fit("fedper", "mlp", federation, rounds=2, out=Path(folder) / "run", progress=False)
            load_run(Path(folder) / "run").model("0")
    except (UserError, RuntimeError, OSError) as error:
        facts["trial run"] = "failed"
        return [f"a trial run failed: {error}"]
    facts["trial run"] = f"{time.perf_counter() - begun:.2f} s"
    return []
