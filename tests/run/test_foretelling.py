"""A long run says how long it will take before its first round, and is not changed by having been timed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

import fedloom as fl
from fedloom import foretelling
from fedloom.client import Desk
from fedloom.engines import LoopEngine
from fedloom.engines.vectorised import VectorisedEngine
from tests.helpers import bn_mlp, federation, mlp
from tests.run.test_resume import contents

pytestmark = pytest.mark.filterwarnings("ignore:clients that never took part")
SIZES = (40, 24, 16, 32, 8)
OPTIONS: dict[str, Any] = {"data": federation(SIZES), "cohort": 3, "batch_size": 8, "epochs": 2, "seed": 1}


def test_the_estimate_is_about_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 20 ms: three clients of at most 10 steps take 0.6 s one after another and 0.2 s side by side; the machine may be busy."""
    from fedloom.engines.vectorised.stepper import MappedStepper
    from fedloom.stepping import Stepper

    for cls in (Stepper, MappedStepper):
        plain = cls.step

        def slow(self: Any, *args: Any, plain: Any = plain) -> None:
            time.sleep(0.02)
            plain(self, *args)

        monkeypatch.setattr(cls, "step", slow)
    result = fl.fit("fedper", mlp(), **OPTIONS, rounds=1, engine="loop", progress=False)
    state = result.run
    state.engine = LoopEngine()
    one_by_one = foretelling.round_seconds(state)
    state.engine = VectorisedEngine()
    together = foretelling.round_seconds(state)
    assert one_by_one is not None
    assert together is not None
    assert 0.2 < one_by_one < 6
    assert 0.05 < together < one_by_one


def test_it_is_said_before_the_first_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    options = OPTIONS | {"method": "scaffold", "model": bn_mlp(), "rounds": 3, "engine": "vectorised"}
    fl.fit(**options, out=tmp_path / "quiet", progress=False)
    assert capfd.readouterr().err == ""
    monkeypatch.setattr(foretelling, "may_be_long", lambda run: True)
    monkeypatch.setattr("fedloom.session._LONG", 0.0)
    said: list[str] = []

    def look(record: dict[str, Any]) -> None:
        said.append(capfd.readouterr().err)

    fl.fit(**options, out=tmp_path / "told", callbacks=[look])
    assert "3 rounds will take about" in said[0]
    assert contents(tmp_path / "told") == contents(tmp_path / "quiet")


def test_a_short_run_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(run: Any) -> float:
        raise AssertionError("timed for nothing")

    monkeypatch.setattr(foretelling, "round_seconds", never)
    fl.fit("fedavg", mlp(), **OPTIONS, rounds=2)


def test_a_run_that_fails_is_not_hidden_by_the_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    result = fl.fit("fedavg", mlp(), **OPTIONS, rounds=1, progress=False)

    def fail(desk: Desk, program: Any) -> None:
        raise fl.errors.RunError("no")

    monkeypatch.setattr(Desk, "run", fail)
    assert foretelling.round_seconds(result.run) is None
