"""Noise at sites and at the server, and the privacy that it amounts to."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import norm

import fedloom as fl
from fedloom import rng
from fedloom.plugins.privacy import accountant
from tests.helpers import bn_mlp, federation, fit, mlp, shared

pytest.importorskip("dp_accounting")


def exact(multiplier: float, delta: float) -> float:
    """The smallest epsilon of one Gaussian release (Balle and Wang 2018, Theorem 8), by bisection."""

    def failure(epsilon: float) -> float:
        a, b = 1 / (2 * multiplier), epsilon * multiplier
        return float(norm.cdf(a - b) - math.exp(epsilon) * norm.cdf(-a - b))

    low, high = 0.0, 100.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if failure(middle) > delta else (low, middle)
    return high


@pytest.mark.parametrize("multiplier", [0.7, 1.0, 4.0])
@pytest.mark.parametrize("releases", [1, 10])
def test_epsilon_is_above_the_exact_one_and_close_to_it(multiplier: float, releases: int) -> None:
    """Gaussian releases compose exactly: T of multiplier z are one of z / sqrt(T)."""
    smallest = exact(multiplier / math.sqrt(releases), 1e-5)
    assert smallest <= accountant.epsilon(multiplier, releases, 1e-5) <= 1.15 * smallest


def test_no_release_costs_nothing() -> None:
    assert accountant.epsilon(1.0, 0, 1e-5) == 0.0


def run(method: str, **options: Any) -> fl.Result:
    settings = {"rounds": 4, "epochs": 1, "batch_size": 4, "cohort": 2, "optimizer": fl.sgd(0.05)} | options
    return fit(method, settings.pop("model", mlp()), federation((9, 14, 5, 6)), engine="loop", **settings)


@pytest.mark.parametrize(("at", "multiplier"), [("site", 1.5), ("server", 3.0)])
def test_every_round_records_what_was_spent(at: str, multiplier: float) -> None:
    result = run(f"fedavg + clip(0.5) + noise(1.5, at={at!r}) + account(1e-4)")
    asked: Counter[str] = Counter()
    for record in result.history:
        asked.update(record["clients"])
        spent = record["account"]
        assert spent["releases"] == max(asked.values())
        assert spent["noise_multiplier"] == multiplier
        assert spent["epsilon"] == accountant.epsilon(multiplier, max(asked.values()), 1e-4)
        assert (spent["delta"], spent["noise_at"], spent["unprotected"]) == (1e-4, at, [])


def flat(result: fl.Result) -> np.ndarray:
    return torch.cat([v.flatten() for v in shared(result).values()]).double().numpy()


def test_noise_at_the_server_is_sigma_over_the_number_of_updates() -> None:
    wide = {"model": mlp(hidden=400), "rounds": 1, "cohort": 4}
    still = flat(run("fedavg(weight='uniform') + clip(0.5)", **wide))
    moved = flat(run("fedavg + clip(0.5) + noise(2.0, at='server')", **wide))
    found = (moved - still) / (2.0 / 4)
    assert len(found) > 4000
    assert abs(found.mean()) < 0.06
    assert abs(found.std() - 1) < 0.04


def test_noise_at_the_server_comes_before_its_steps() -> None:
    """FedAdam's step is bounded by its size whatever comes in: noise that came after it would not be."""
    start = flat(run("fedadam(eta_s=1e-6) + clip(0.5)", rounds=1))
    moved = flat(run("fedadam(eta_s=1e-6) + clip(0.5) + noise(100.0, at='server')", rounds=1))
    assert np.abs(moved - start).max() < 1e-4


def test_engines_agree_on_noise_at_the_server() -> None:
    text = "fedavg + clip(0.5) + noise(0.1, at='server') + account"
    loop, vectorised = (
        fit(text, mlp(), federation((9, 14, 5)), engine=e, rounds=2, epochs=1, batch_size=4)
        for e in ("loop", "vectorised")
    )
    assert np.abs(flat(loop) - flat(vectorised)).max() < 1e-10
    assert loop.history[-1]["account"] == vectorised.history[-1]["account"]


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        ("fedavg + account", "it follows clip"),
        ("fedavg + clip + account", "it follows clip"),
        ("fedavg + clip + noise + noise(at='server') + account", "it follows clip"),
        ("fedproto + clip + noise + account", "sends"),
        ("scaffold + clip + noise + account", "also sends"),
        ("fedir + clip + noise + account", "also sends 'fedir'"),
        ("fedavg + lag(k=1) + clip + noise(at='server') + account", "also sends 'lag'"),
        ("fedavg + noise(at='server') + clip", "must follow it"),
        ("fedavg + robust + clip + noise(at='server')", "both"),
    ],
)
def test_no_epsilon_where_it_would_not_be_true(method: str, reason: str) -> None:
    with pytest.raises(fl.UserError, match=reason):
        fl.method(method)


def test_what_is_sent_besides_is_named_and_voids_epsilon() -> None:
    spent = run("fedavg + clip + noise + account + prototypes", rounds=1).history[-1]["account"]
    assert (spent["epsilon"], spent["unprotected"]) == (None, ["prototypes"])
    spent = run("fedavg + clip + noise + account", rounds=1, model=bn_mlp()).history[-1]["account"]
    assert (spent["epsilon"], spent["unprotected"]) == (None, ["buffers"])
    # Scores of noisy uploads are made of what was released anyway.
    spent = run("fedavg + lag(k=1, xi=2.0) + clip + noise + account", rounds=3).history[-1]["account"]
    assert spent["unprotected"] == []


def test_resumed_runs_go_on_counting(tmp_path: Path) -> None:
    text = "fedavg + clip + noise(0.1) + account"
    whole = run(text, out=tmp_path / "whole")

    def stop(record: dict[str, Any]) -> bool:
        if record["round"] == 2:
            raise KeyboardInterrupt
        return False

    with pytest.raises(KeyboardInterrupt):
        run(text, out=tmp_path / "part", callbacks=[stop])
    again = run(text, out=tmp_path / "part", resume=True)
    assert [r["account"] for r in again.history] == [r["account"] for r in whole.history]


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accountant.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(fl.UserError, match=r"fedloom\[dp\]"):
        run("fedavg + clip + noise + account", rounds=1)


def test_noise_from_the_system_is_normal_and_never_the_same() -> None:
    key = torch.tensor(rng.key_of(0, "noise"))
    assert torch.equal(rng.secret_normal(key, (5,)), rng.secret_normal(key, (5,)))
    with rng.from_system():
        one, two = rng.secret_normal(key, (300, 200)), rng.secret_normal(key, (300, 200))
    assert torch.equal(rng.secret_normal(key, (5,)), rng.normal(key, (5,)))
    assert float((one * two).mean().abs()) < 0.02
    assert abs(float(one.mean())) < 0.02
    assert abs(float(one.std()) - 1) < 0.02
    assert abs(float((one**4).mean()) - 3) < 0.15


def test_a_deployment_accounts_and_its_noise_is_not_the_seeds(tmp_path: Path) -> None:
    """Who knows the experiment and its seed can rerun it; the noise of a site is not in that."""
    tomli_w = pytest.importorskip("tomli_w")
    from fedloom.flower.experiment import Experiment
    from fedloom.flower.server.serve import serve
    from tests.flower.sites import experiment, grid_of, people, write_sites

    local, central = (
        "fedavg + clip(0.5) + noise(1.0) + account",
        "fedavg + clip(0.5) + noise(1.0, at='server') + account",
    )
    text = tomli_w.dumps(experiment([local, central], rounds=2))
    found = []
    for name in ("one", "two"):
        grid = grid_of(write_sites(tmp_path / name, people()))
        found.append(serve(grid, Experiment.parse(text), text, tmp_path / f"{name}-out", poll=0.0))
    for method, multiplier in ((local, 1.0), (central, 2.0)):
        spent = [r["account"] for r in found[0][method].history]
        assert [s["epsilon"] for s in spent] == [accountant.epsilon(multiplier, t, 1e-5) for t in (1, 2)]
        mine, theirs = (f[method].run.state.leaves for f in found)
        assert all(not torch.equal(mine[n], theirs[n]) for n in mine)
