"""The GPU package is optional: no core module imports it, and without it all methods run."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import fedloom as fl
from fedloom.engines import choose_device
from fedloom.ops import dispatch

PACKAGE = Path(fl.__file__).parent
METHODS = ("fedavg + isr", "fedaims", "fedlag", "fedmap", "scaffold")
SCRIPT = """
import json, sys, warnings
import torch
from torch import nn
import fedloom as fl

warnings.simplefilter("ignore")
torch.set_num_threads(1)

def data():
    draw = torch.Generator().manual_seed(0)
    parts = [(torch.randn(n, 1, 8, 8, generator=draw).numpy(), (torch.arange(n) % 3).numpy()) for n in (9, 14, 5, 7)]
    return fl.Federation.from_arrays([(own, own) for own in parts])

def model():
    block = lambda i, o: nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU(), nn.MaxPool2d(2))
    return nn.Sequential(block(1, 4), block(4, 6), nn.Dropout(0.2), nn.Flatten(), nn.Linear(24, 8), nn.ReLU(), nn.Linear(8, 3))

def sums(method, engine):
    options = dict(rounds=2, epochs=1, batch_size=4, precision="fp64", progress=False, device="cpu", optimizer=fl.sgd(0.05))
    result = fl.fit(method, model, data(), engine=engine, **options)
    return [float(v.double().abs().sum()) for v in result.run.state.leaves.values()]

found = {f"{engine} {method}": sums(method, engine) for engine in ("loop", "vectorised") for method in METHODS}
loaded = "fedloom.gpu" in sys.modules
from fedloom.engines.choose_device import choose_device
from fedloom.engines.vectorised import VectorisedEngine
torch.cuda.is_available = lambda: True
captures = VectorisedEngine()._captured_steps(choose_device("cuda", "fp32")) is not None
print(json.dumps([fl.__file__, loaded, captures, found]))
"""


def test_runs_without_the_package(tmp_path: Path) -> None:
    """Without the folder, runs on a CPU give equal bits on both engines, and no device captures steps."""
    folder = shutil.copytree(PACKAGE, tmp_path / "fedloom", ignore=shutil.ignore_patterns("gpu", "__pycache__"))
    assert not (folder / "gpu").exists()
    found = []
    for path in (tmp_path, PACKAGE.parent):
        code = f"METHODS = {METHODS!r}\n{SCRIPT}"
        paths = os.pathsep.join([str(path), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": paths, "TRITON_INTERPRET": "0"}
        done = subprocess.run([sys.executable, "-P", "-c", code], env=environment, capture_output=True, text=True)
        assert not done.returncode, done.stderr
        where, loaded, captures, sums = json.loads(done.stdout.splitlines()[-1])
        assert Path(where).is_relative_to(path)
        assert not loaded  # runs on a CPU do not import it
        assert captures == (path != tmp_path)
        found.append(sums)
    assert found[0] == found[1]


def imported(tree: ast.AST, package: tuple[str, ...]) -> Iterator[str]:
    """Yield the names of all modules that a file imports, also inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            start = ".".join((*base, *filter(None, [node.module])))
            yield start
            yield from (f"{start}.{alias.name}" for alias in node.names)


def test_no_other_package_imports_it() -> None:
    for path in sorted(PACKAGE.rglob("*.py")):
        inside = path.relative_to(PACKAGE.parent).parent.parts
        if inside[:2] == ("fedloom", "gpu"):
            continue
        names = set(imported(ast.parse(path.read_text()), inside))
        assert not {n for n in names if n == "fedloom.gpu" or n.startswith("fedloom.gpu.")}, path


def test_plain_form_computes_what_the_implementation_does_not_support(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_plain", {})
    monkeypatch.setattr(dispatch, "_faster", {})

    @dispatch.operator
    def doubled(x: torch.Tensor, *, once: bool = False) -> torch.Tensor:
        return x if once else 2 * x

    one = torch.ones(1)
    assert doubled(one).item() == 2

    def implementation(x: torch.Tensor, *, once: bool = False) -> torch.Tensor | None:
        return None if once else 3 * x

    implementation.__name__ = "doubled"
    dispatch.register(implementation)
    assert [doubled(one).item(), doubled(one, once=True).item()] == [3, 1]
    implementation.__name__ = "other"
    with pytest.raises(AssertionError, match="no operators: other"):
        dispatch.register(implementation)


@pytest.mark.parametrize("missing", ["fedloom.gpu", "triton"])
def test_kernels_are_not_loaded_without_their_package_or_triton(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose_device, "load", lambda name: pytest.fail(f"loads {name}"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else object())
    load_gpu_package = choose_device._load_gpu_package.__wrapped__  # without the cache
    assert load_gpu_package() == (missing != "fedloom.gpu")


@pytest.mark.parametrize(
    ("name", "interpreted", "loads"), [("cpu", False, False), ("cpu", True, True), ("cuda", False, True)]
)
def test_gpu_package_is_loaded_for_cuda_and_the_interpreter(
    name: str, interpreted: bool, loads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[bool] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(dispatch, "INTERPRETED", interpreted)
    monkeypatch.setattr(choose_device, "_load_gpu_package", lambda: calls.append(True) or True)
    device = choose_device.choose_device(name, "bf16")
    assert (device.torch_device, device.has_gpu_package) == (torch.device(name), loads)
    assert (device.dtype, device.autocast) == (torch.float32, torch.bfloat16)
    assert len(calls) == loads


def test_only_choose_device_creates_a_device() -> None:
    """A network needs a ``Device``, so none is built before the kernels of its device are registered."""
    places = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "Device":
                places.append(path.relative_to(PACKAGE).as_posix())
    assert places == ["engines/choose_device.py"]
