"""``tune``: every way is timed, the first round of each left out, the fastest told."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import fedloom as fl
from fedloom.engines import tuning
from fedloom.engines.vectorised import VectorisedEngine
from fedloom.errors import NotVectorisable, UserError
from tests.helpers import federation, mlp


def clock(seconds: dict[str, float], calls: list[dict[str, Any]] | None = None) -> Callable[..., Any]:
    """A ``fit`` whose rounds take as long as told, and whose first round is slow."""

    def fit(*args: Any, **options: Any) -> Any:
        engine = options["engine"]
        name = "compiled" if isinstance(engine, VectorisedEngine) else "workers" if options["workers"] else engine
        if calls is not None:
            calls.append({"args": args, **options})
        if name not in seconds:
            raise NotVectorisable("the model looks at its numbers")
        rounds = [99.0] + [seconds[name]] * (options["rounds"] - 1)
        return SimpleNamespace(history=[{"seconds": s} for s in rounds])

    return fit


@pytest.mark.parametrize(
    ("fastest", "answer"),
    [
        ("loop", {"engine": "loop", "workers": 0, "step": "auto"}),
        ("vectorised", {"engine": "vectorised", "workers": 0, "step": "auto"}),
        ("compiled", {"engine": "vectorised", "workers": 0, "step": "compiled"}),
        ("workers", {"engine": "loop", "workers": 4, "step": "auto"}),
    ],
)
def test_the_fastest_is_told(fastest: str, answer: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning.os, "cpu_count", lambda: 4)
    seconds = dict.fromkeys(("loop", "vectorised", "compiled", "workers"), 2.0) | {fastest: 1.0}
    found = tuning.tune(clock(seconds), compiled=True)
    assert {k: found[k] for k in answer} == answer
    assert found["seconds"] == {k if k != "workers" else "workers 4": v for k, v in seconds.items()}


def test_a_way_that_cannot_be_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning.os, "cpu_count", lambda: 1)
    calls: list[dict[str, Any]] = []
    found = tuning.tune(clock({"loop": 3.0}, calls), "fedavg", rounds=2, cohort=5, evaluate={"every": 1})
    assert found["seconds"] == {"loop": 3.0}
    assert [c["engine"] for c in calls] == ["loop", "vectorised"], "with one processor there are no workers to try"
    assert all(c["rounds"] == 3 and c["evaluate"] == {"every": 0} and not c["progress"] for c in calls)
    assert all(c["args"] == ("fedavg",) and c["cohort"] == 5 for c in calls)


def test_other_errors_are_not_hidden() -> None:
    def broken(*args: Any, **options: Any) -> Any:
        raise UserError("no such client")

    with pytest.raises(UserError, match="no such client"):
        tuning.tune(broken)


def test_a_real_run_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning.os, "cpu_count", lambda: 1)
    found = tuning.tune(fl.fit, "fedavg", mlp(), federation(), rounds=2, cohort=2)
    assert set(found["seconds"]) == {"loop", "vectorised"}
    assert found["engine"] == min(found["seconds"], key=lambda name: found["seconds"][name])
