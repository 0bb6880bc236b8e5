"""Every example is run, in a small setting."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from fedloom.spec.registry import METHODS, PLUGINS

EXAMPLES = Path(__file__).parents[2] / "examples"

if not EXAMPLES.is_dir():
    pytest.skip("examples/ is not here: this is no clone of the repository", allow_module_level=True)


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    """Names that an example registers are gone afterwards."""
    methods, plugins = dict(METHODS), dict(PLUGINS)
    yield
    for table, before in ((METHODS, methods), (PLUGINS, plugins)):
        table.clear()
        table.update(before)


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(name).stem, EXAMPLES / name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sections(page: Path) -> set[str]:
    text = page.read_text(encoding="utf-8")
    return {part.partition('"')[0] for part in text.split('<section id="')[1:]}


def test_hospitals_with_made_up_patients(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = load("four_hospitals/simulate.py").main(tmp_path, rounds=2, cuts=2, made_up=True)
    assert "switzerland" in capsys.readouterr().out
    assert {"clients", "partition", "projection", "cost", "client-table"} <= sections(page)


@pytest.mark.data
def test_hospitals_with_real_patients(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = load("four_hospitals/simulate.py").main(tmp_path, rounds=2, cuts=1)
    assert "made up" not in capsys.readouterr().out
    assert "hungarian" in page.read_text(encoding="utf-8")


def test_a_fleet_across_borders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fleet = load("street_fleet.py")
    page = fleet.main(
        tmp_path, rounds=2, epochs=1, towns=3, frames=12, size=(32, 32), methods=("fedavg + isr(points=1)",)
    )
    assert "the cloud's share went from" in capsys.readouterr().out
    assert {"hybrid", "pictures", "terms", "partition"} <= sections(page)
    assert "data:image/png;base64" in page.read_text(encoding="utf-8")


def test_a_method_of_ones_own(tmp_path: Path) -> None:
    page = load("own_method.py").main(tmp_path / "grid", rounds=1, seeds=2, others=("local", "fedper"), jobs=1)
    assert {"headline", "clients", "tables"} <= sections(page)
    assert (tmp_path / "grid" / "tables" / "summary.tex").exists()
