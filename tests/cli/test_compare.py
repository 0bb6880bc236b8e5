"""``fedloom compare``."""

from __future__ import annotations

import json
from pathlib import Path

import fedloom as fl
from tests.cli.conftest import Cli


def test_compare(cli: Cli, config: Path, tmp_path: Path) -> None:
    words = [
        "compare",
        config,
        "--methods",
        "fedavg; fedper",
        "--seeds",
        "0-1",
        "--sweep",
        "data.alpha=0.1,1",
        "--jobs",
        1,
    ]
    done = cli(*words, "--set", "rounds=1", "--out", tmp_path / "c", "--json")
    assert done.status == 0, done.err
    found = json.loads(done.out)
    assert [(r["setting"], r["method"], r["value_n"]) for r in found["summary"]] == [
        (f"data.alpha={a}", m, 2) for a in ("0.1", "1") for m in ("fedavg", "fedper")
    ]
    assert len(found["cells"]) == 8
    assert fl.load_comparison(tmp_path / "c").of("fedper")[0].config["data"]["partition"] == "dirichlet(0.1)"
    again = cli(*words, "--set", "rounds=1", "--out", tmp_path / "c")
    assert again.status == 0
    assert "over fedavg" in again.out
    assert again.err == ""  # nothing was run
    assert cli(*words, "--set", "rounds=1", "--out", tmp_path / "c", "--quiet").out == ""
    assert "rounds was 1" in cli(*words, "--out", tmp_path / "c").mistake()


def test_the_configurations_own_method_and_a_failure(cli: Cli, config: Path, tmp_path: Path) -> None:
    done = cli(
        "compare", config, "--seeds", "3", "--sweep", "model.hidden=[4],[-1]", "--out", tmp_path / "c", "--jobs", 1
    )
    assert done.status == 1
    assert "Failed: fedavg, model.hidden=[-1], seed 3" in " ".join(done.out.split())
    assert "1/2  fedavg, model.hidden=[4], seed 3: accuracy" in done.err


def test_mistakes(cli: Cli, config: Path) -> None:
    assert "Did you mean 'fedprox'" in cli("compare", config, "--methods", "fedavg; fedpox").mistake()
    assert "expected numbers" in cli("compare", config, "--seeds", "x").mistake()
    assert "argument of its partition" in cli("compare", config, "--sweep", "data.alfa=1").mistake()
    assert "unknown baseline" in cli("compare", config, "--baseline", "fedper").mistake()
    assert "jobs='none'" in cli("compare", config, "--jobs", "none").mistake()
    assert "cannot read" in cli("compare", "nowhere.toml").mistake()
