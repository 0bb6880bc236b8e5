"""Every method gives the numbers that were recorded, on both engines, in float64."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.golden.cases import NETWORKS, play, project, texts

EXPECTED: dict[str, list[float]] = json.loads((Path(__file__).parent / "values.json").read_text())


@pytest.mark.parametrize("text", texts())
@pytest.mark.parametrize("network", list(NETWORKS))
def test_numbers_do_not_change(network: str, text: str) -> None:
    """``python scripts/golden.py values`` records them anew after a change that is meant to move them."""
    expected = EXPECTED[f"{network} | {text}"]
    for engine in ("loop", "vectorised"):
        assert project(play(text, network, engine, precision="fp64")) == pytest.approx(expected, rel=1e-10, abs=1e-10)
