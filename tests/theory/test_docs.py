"""The numbers of docs/theory.md are computed, not remembered; every calculator is on that page."""

from __future__ import annotations

import doctest
from pathlib import Path

from fedloom import theory

PAGE = Path(__file__).parents[2] / "docs" / "theory.md"


def test_examples_of_the_page() -> None:
    result = doctest.testfile(str(PAGE), module_relative=False, encoding="utf-8")
    assert result.attempted > 15
    assert result.failed == 0


def test_every_calculator_is_on_the_page() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert [name for name in theory.CALCULATORS if f"`{name}`" not in text] == []
