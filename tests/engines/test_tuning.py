"""``fedloom tune``: times each engine, leaves out its first round and engines that cannot run the configuration."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fedloom.cli import run
from fedloom.errors import NotVectorisable


@pytest.mark.parametrize("seconds", [{"loop": 1.0, "vectorised": 2.0}, {"loop": 3.0}])
def test_each_engine_is_timed_without_its_first_round(
    seconds: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fit(**options: Any) -> Any:
        fixed = {"workers": 0, "rounds": 3, "evaluate": {"every": 0}, "progress": False, "cohort": 5, "model": "mlp"}
        assert options == {**fixed, "engine": options["engine"]}
        if options["engine"] not in seconds:
            raise NotVectorisable("the model looks at its numbers")
        return SimpleNamespace(history=[{"seconds": s} for s in (99.0, *[seconds[options["engine"]]] * 2)])

    monkeypatch.setattr(run, "fit", fit)
    table = {"cohort": 5, "workers": 4, "evaluate": {"every": 1}, "engine": "auto"}
    assert run.measure_engines(table, 2) == seconds
