"""The front-end's view: every calculator by name, its arguments, and the surface of the package."""

from __future__ import annotations

import inspect
from pathlib import Path

import numpy as np
import pytest

from fedloom import theory
from fedloom.errors import UnknownName

SAMPLES = {"number": 0.5, "whole": 3, "numbers": (0.5, 0.25, 0.75), "mode": "sound", "flag": True}
AT_LEAST_ONE = {"steps": 2.0, "rounds": 50.0, "samples": 10.0, "points": 5, "s_high": 2.0}


@pytest.mark.parametrize("name", theory.CALCULATORS)
@pytest.mark.parametrize("mode", ["paper", "sound"])
def test_every_calculator_runs_on_plain_numbers(name: str, mode: str) -> None:
    found = theory.parameters(name)
    values = {p.name: AT_LEAST_ONE.get(p.name, SAMPLES[p.kind]) for p in found}
    values |= {"mode": mode} if "mode" in values else {}
    answer = theory.CALCULATORS[name](**values)
    assert isinstance(answer, theory.Answer)
    assert isinstance(answer.value, float | np.ndarray)
    assert (answer.mode is not None) == ("mode" in values)
    assert bool(answer.reason) == (not np.all(np.isfinite(answer.value)))
    assert answer.name in answer.summary()
    for condition in (*answer.conditions, *answer.claims):
        assert isinstance(condition.holds, bool | np.ndarray)


@pytest.mark.parametrize("name", [*theory.CALCULATORS, *theory.TABLES])
def test_every_argument_is_described(name: str) -> None:
    found = theory.parameters(name)
    function = {**theory.CALCULATORS, **theory.TABLES}[name]
    assert [p.name for p in found] == list(inspect.signature(function).parameters)
    assert all(p.kind == inspect.Parameter.KEYWORD_ONLY for p in inspect.signature(function).parameters.values())
    assert all(p.help for p in found)
    assert theory.one_line(name).endswith(".")
    assert "Reference:" in (function.__doc__ or "")


def test_unknown_names_suggest_near_ones() -> None:
    with pytest.raises(UnknownName, match="Did you mean 'fl-bound'"):
        theory.parameters("fl-bond")
    with pytest.raises(UnknownName, match="modes"):
        theory.one_line("mode")


def test_surface() -> None:
    assert theory.__all__ == sorted(theory.__all__)
    assert all(hasattr(theory, name) for name in theory.__all__)
    modules = {path.stem for path in Path(theory.__file__).parent.glob("*.py")}
    assert not modules & set(theory.__all__), "no module bears the name of a public function"
    assert {f.__name__ for f in theory.CALCULATORS.values()} <= set(theory.__all__)


def test_figures_are_named() -> None:
    assert dict(theory.FIGURES)["escape"] is theory.draw_escape
