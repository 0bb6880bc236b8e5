"""Diagnostics against closed forms on quadratics, and that they change nothing."""

from __future__ import annotations

import copy
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import fedloom as fl
from fedloom import theory
from fedloom.errors import UserError
from fedloom.theory import measured as diagnostics
from tests.helpers import federation, mlp

X = np.array([[[1.0], [1.0]], [[1.0], [-1.0]], [[-1.0], [1.0]]])
Y = np.array([[1.0, 3.0], [2.0, -4.0], [0.0, 6.0]])
P = np.full(3, 1 / 3)


def lines() -> fl.Federation:
    """Three clients of ``f_k = mean (w x - y)^2`` with equal curvature 2 and minima 2, 3, 3."""
    return fl.Federation.from_arrays([((x, y[:, None]), (x, y[:, None])) for x, y in zip(X, Y, strict=True)])


def flat() -> nn.Module:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 0.5)
    return model


def slope(w: float, k: int, rows: slice = slice(None)) -> float:
    x, y = X[k, rows, 0], Y[k, rows]
    return float(np.mean(2 * x * (w * x - y)))


fit = partial(
    fl.fit, task="regression", precision="fp64", optimizer=fl.sgd(lr=0.1), progress=False, diagnostics={}, epochs=1
)


def test_gradients_heterogeneity_smoothness_and_drift_on_quadratics() -> None:
    (first, second) = (r["diagnostics"] for r in fit("fedavg", flat(), lines(), rounds=2, batch_size="full").history)
    g = np.array([slope(0.5, k) for k in range(3)])
    assert first["gradient_norm"] == pytest.approx(abs(P @ g), rel=1e-12)
    assert first["client_gradient_norm"] == pytest.approx(P @ abs(g), rel=1e-12)
    assert first["heterogeneity"] == pytest.approx(P @ (g - P @ g) ** 2, rel=1e-12)
    assert first["noise"] == pytest.approx(0.0, abs=1e-12)
    assert first["smoothness"] == pytest.approx(2.0, rel=1e-9), "the second derivative of every client's loss"
    assert first["drift"] == pytest.approx(np.mean((0.1 * g) ** 2), rel=1e-12)
    assert first["aggregation_jump"] == pytest.approx(max((0.1 * (g - P @ g)) ** 2), rel=1e-12)
    assert first["local_steps"] == 1
    w = 0.5 - 0.1 * P @ g
    assert second["gradient_norm"] == pytest.approx(abs(P @ [slope(w, k) for k in range(3)]), rel=1e-12)
    assert "kappa" not in first, "there is no term but the data's"


def test_noise_is_the_spread_of_mini_batches() -> None:
    found = fit("fedavg", flat(), lines(), rounds=1, batch_size=1).history[0]["diagnostics"]
    of = [[slope(0.5, k, slice(i, i + 1)) for i in range(2)] for k in range(3)]
    assert found["noise"] == pytest.approx(np.mean([np.var(v) for v in of]), rel=1e-12)


def test_kappa_of_control_variates_is_zero_where_curvatures_agree_and_one_before_they_are_known() -> None:
    first, second = (r["diagnostics"] for r in fit("scaffold", flat(), lines(), rounds=2, batch_size="full").history)
    assert first["kappa"] == pytest.approx(1.0, rel=1e-12)
    assert second["kappa"] == pytest.approx(0.0, abs=1e-20)
    assert second["heterogeneity_data"] > 0.1


def test_conflict_counts_pairs_that_pull_apart() -> None:
    start = flat()
    nn.init.constant_(start.weight, 2.5)
    found = fit("fedavg", start, lines(), rounds=1, batch_size="full").history[0]["diagnostics"]
    assert found["conflict"] == {"": pytest.approx(2 / 3)}, "minima at 2, 3 and 3: two of three pairs"
    assert found["cosine"] == {"": pytest.approx(-1 / 3)}


def test_the_cloud_and_the_sites_pull_the_same_way() -> None:
    options = {"cloud_clients": ("0",), "mixing": "fixed"}
    found = fit("fedavg", flat(), lines(), mode="hybrid", hybrid=options, rounds=1, batch_size="full")
    assert found.history[0]["diagnostics"]["cosine_cloud"] == 1.0


@pytest.mark.parametrize("method", ["fedavg + isr(points=1)", "fedper", "scaffold", "local", "fedaims"])
@pytest.mark.parametrize("engine", ["loop", "vectorised"])
def test_a_run_is_the_same_with_and_without(method: str, engine: str) -> None:
    if method == "fedaims":
        model, data = partial(fl.models.convnet3, 3, 1, width=4), pictures()
    else:
        model, data = mlp(), federation()
    options = {"rounds": 3, "cohort": 2, "batch_size": 4, "engine": engine, "progress": False}
    plain = fl.fit(method, model, data, **options)
    measured = fl.fit(method, model, data, diagnostics={"every": 2}, **options)
    for a, b in zip(plain.history, measured.history, strict=True):
        assert (a["loss"], a["train_loss"]) == (b["loss"], b["train_loss"])
    assert [("diagnostics" in r) for r in measured.history] == [True, True, False]


def pictures() -> fl.Federation:
    draw = np.random.default_rng(0)
    rows = [(draw.normal(size=(8, 1, 8, 8)).astype(np.float32), draw.integers(0, 3, 8)) for _ in range(4)]
    return fl.Federation.from_arrays([(r, r) for r in rows])


def test_bounds_stand_beside_measurements() -> None:
    result = fit("fedavg", flat(), lines(), rounds=5, batch_size="full")
    rows = {row.name.split(",")[0].split(" (")[0]: row for row in diagnostics.beside(result)}
    worst = max(
        r["diagnostics"]["drift"]
        / theory.drift_bound(
            eta_t=0.1, steps=1, grad_sq=r["diagnostics"]["gradient_norm"] ** 2, noise=r["diagnostics"]["noise"],
            heterogeneity=r["diagnostics"]["heterogeneity"], smoothness=2.0, mode="sound",
        ).value
        for r in result.history
    )  # fmt: skip
    drift = rows["drift"]
    assert drift.holds
    assert drift.measured is not None
    assert drift.bound is not None
    assert drift.measured / drift.bound == pytest.approx(worst, rel=1e-6)
    assert "within" in diagnostics.markdown(rows.values()).splitlines()[0]


def test_a_run_without_diagnostics_says_what_to_do() -> None:
    with pytest.raises(UserError, match="diagnostics"):
        diagnostics.beside(fl.fit("fedavg", mlp(), federation(), rounds=1, progress=False))
    with pytest.raises(UserError, match="every"):
        fl.fit("fedavg", mlp(), federation(), rounds=1, diagnostics={"every": 0}, progress=False)


def test_heterogeneity_of_isr_is_that_of_autograd() -> None:
    """H of ``CE + alpha MI + lam NE`` on one full batch, by plain autograd on the same leaves."""
    data, model = federation(), mlp()()
    result = fl.fit(
        "fedavg + isr(alpha=0.3, lam=0.2, points=1)", model, data, rounds=1, batch_size="full", precision="fp64",
        diagnostics={}, progress=False,
    )  # fmt: skip
    found = result.history[0]["diagnostics"]
    weights = [len(c.train) / sum(len(d.train) for d in data) for c in data]
    plain = []
    net = copy.deepcopy(model).double()
    for client in data:
        loss = nn.functional.cross_entropy(net(client.train.x.double()), client.train.y)
        plain.append(torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(net.parameters()))]))
    middle = sum(p * g for p, g in zip(weights, plain, strict=True))
    expected = sum(p * float((g - middle).square().sum()) for p, g in zip(weights, plain, strict=True))
    assert found["heterogeneity_data"] == pytest.approx(expected, rel=1e-9)
    assert found["kappa"] == pytest.approx(found["heterogeneity"] / expected, rel=1e-9)
    assert found["kappa"] != 1.0
