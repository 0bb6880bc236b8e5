"""FedMAP once more from its Algorithms 1 to 3, in plain PyTorch, with every prior and every weight."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import optimize
from torch import Tensor, nn

import fedloom as fl
from fedloom import rng
from tests.helpers import bn_mlp, federation, fit, gap, mlp, own, run_of, shared
from tests.oracles import naive

DATA = federation((9, 14, 5, 8), seed=5)
ROUNDS, SIZE = 3, 3
State = dict[str, Tensor]


def fedmap(
    make: Callable[[], nn.Module],
    penalty: Callable[[str, Tensor, State], Tensor],
    server: Callable[[State, list[State], list[float], State], State],
    omega: str = "mean_loglik",
    start: str = "own",
    learnt: State | None = None,
) -> tuple[State, dict[str, State], State]:
    """gamma, the clients' models, and what else the prior learnt."""
    model = naive.initial(make)
    names = [n for n, _ in model.named_parameters()]
    bn = any(isinstance(m, nn.BatchNorm1d) for m in model.modules())
    gamma, mine, extra = naive.state(model), {}, dict(learnt or {})
    for r in range(1, ROUNDS + 1):
        ends, logs = [], []
        for client in naive.cohort(DATA, r, SIZE):
            begin = dict(mine.get(client.id, gamma))
            if start == "gamma":
                begin |= {n: gamma[n] for n in names}
            net = naive.clone(model)
            net.load_state_dict(begin)
            net.train()

            def loss(net: nn.Module, x: Tensor, y: Tensor, gamma: State = gamma) -> Tensor:
                prior = sum(penalty(n, p - gamma[n], extra) for n, p in net.named_parameters())
                return F.cross_entropy(net(x), y) + prior

            naive.train(net, client, naive.order(client, r, bn=bn), loss)
            net.eval()
            x, y = naive.rows(client)
            with torch.no_grad():
                nll = float(F.cross_entropy(net(x), y, reduction="sum"))
                size = float(sum(penalty(n, p - gamma[n], extra) for n, p in net.named_parameters()))
            rows = len(y)
            logs.append(
                {
                    "mean_loglik": -nll / rows - size,
                    "mean_loglik_n": -nll / rows - size / rows,
                    "sum_loglik": -nll - size,
                    "n": math.log(rows),
                    "uniform": 0.0,
                }[omega]
            )
            mine[client.id] = naive.state(net)
            ends.append(mine[client.id])
        raw = [math.exp(v - max(logs)) for v in logs]
        weights = [v / sum(raw) for v in raw]
        gamma = {**gamma, **server({n: gamma[n] for n in names}, ends, weights, extra)}
    return gamma, mine, extra


def average(gamma: State, ends: list[State], weights: list[float], extra: State) -> State:
    return {n: sum(w * e[n] for w, e in zip(weights, ends, strict=True)) for n in gamma}


def check(result: fl.Result, gamma: State, mine: dict[str, State]) -> None:
    names = [n for n in gamma if not n.split(".")[-1].startswith(("running", "num"))]
    assert gap({n: gamma[n] for n in names}, {n: shared(result)[n] for n in names}) < 1e-10
    for client, state in mine.items():
        floats = {n: v for n, v in state.items() if v.is_floating_point()}
        found = own(result, client)
        assert gap(floats, {n: found[n] for n in floats}) < 1e-10


def run(make: Callable[[], nn.Module], **options: object) -> fl.Result:
    return fit(fl.fedmap(**options), make, DATA, rounds=ROUNDS, cohort=SIZE)  # type: ignore[arg-type]


@pytest.mark.parametrize("omega", ["mean_loglik", "mean_loglik_n", "sum_loglik", "n", "uniform"])
@pytest.mark.parametrize("make", [mlp(), bn_mlp()])
def test_gaussian(omega: str, make: Callable[[], nn.Module]) -> None:
    gamma, mine, _ = fedmap(make, lambda n, d, e: (d**2).sum() / (2 * 0.8), average, omega)
    check(run(make, sigma2=0.8, omega=omega), gamma, mine)


def test_start_from_gamma() -> None:
    gamma, mine, _ = fedmap(mlp(), lambda n, d, e: (d**2).sum() / (2 * 0.8), average, start="gamma")
    check(run(mlp(), sigma2=0.8, start="gamma"), gamma, mine)


def test_begin_with_the_model_of_one_client() -> None:
    """Algorithm 1, lines 3 to 5: one local phase of one client, whose model is gamma and theta for all."""
    drawn = DATA.ids[int(rng.stream(0, "sample", "setup").integers(len(DATA.ids)))]
    model = naive.initial(mlp())
    naive.train(model, DATA[drawn], naive.order(DATA[drawn], 0, stream="first"))
    first = naive.state(model)
    begun = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    begun.load_state_dict(first)
    result = run(mlp(), sigma2=0.8, init="client")
    plain = fit(fl.fedmap(sigma2=0.8), begun, DATA, rounds=ROUNDS, cohort=SIZE)
    assert gap(shared(plain), shared(result)) < 1e-12
    for client in DATA:
        assert gap(own(plain, client.id), own(result, client.id)) < 1e-12


def test_precision_by_pattern() -> None:
    scale = {"0.weight": 0.5, "0.bias": 0.5, "2.weight": 3.0, "2.bias": 0.0}
    gamma, mine, _ = fedmap(mlp(), lambda n, d, e: scale[n] * (d**2).sum() / 2, average)
    prior = fl.gaussian(sigma2=2.0, precision={"2.bias": 0.0, "head": 3.0})
    check(run(mlp(), prior=prior), gamma, mine)


def test_server_steps_of_a_gaussian() -> None:
    def descend(gamma: State, ends: list[State], weights: list[float], extra: State) -> State:
        for _ in range(3):
            slope = {n: sum(w * (gamma[n] - e[n]) for w, e in zip(weights, ends, strict=True)) / 0.8 for n in gamma}
            gamma = {n: gamma[n] - 0.2 * slope[n] for n in gamma}
        return gamma

    gamma, mine, _ = fedmap(mlp(), lambda n, d, e: (d**2).sum() / (2 * 0.8), descend)
    check(run(mlp(), sigma2=0.8, server_lr=0.2, server_steps=3), gamma, mine)


def test_learnable_variance_by_steps() -> None:
    eps, c, lr = 0.01, 1.0, 0.3

    def descend(gamma: State, ends: list[State], weights: list[float], extra: State) -> State:
        for n in gamma:
            for _ in range(2):
                alpha = 1 / (extra[n] + c)
                down = (
                    -sum(w * alpha * (e[n] - gamma[n]) for w, e in zip(weights, ends, strict=True)) + 2 * eps * gamma[n]
                )
                spread = sum(w * (e[n] - gamma[n]) ** 2 for w, e in zip(weights, ends, strict=True))
                wide = -spread / (2 * (extra[n] + c) ** 2) + 2 * eps * extra[n]
                gamma[n], extra[n] = gamma[n] - lr * down, extra[n] - lr * wide
        return gamma

    zeros = {n: torch.zeros_like(v) for n, v in naive.state(naive.initial(mlp())).items()}
    gamma, mine, extra = fedmap(mlp(), lambda n, d, e: (d**2 / (e[n] + c)).sum() / 2, descend, learnt=zeros)
    result = run(mlp(), prior=fl.learnable_gaussian(eps=eps, c=c), server_lr=lr, server_steps=2)
    check(result, gamma, mine)
    assert gap(extra, run_of(result).state.memory["map_prior"]) < 1e-10


def scalar_minimum(fn: Callable[[np.ndarray], float], start: list[float]) -> np.ndarray:
    options = {"xatol": 1e-12, "fatol": 1e-15, "maxiter": 4000, "maxfev": 4000}
    found = optimize.minimize(fn, start, method="Nelder-Mead", options=options).x
    return optimize.minimize(fn, found, method="Nelder-Mead", options=options).x


def test_learnable_variance_is_minimised_jointly() -> None:
    """One round against a generic minimiser of eq. 21, coordinate by coordinate."""
    eps = 0.01
    result = fit(fl.fedmap(prior=fl.learnable_gaussian(eps=eps), omega="uniform"), data=DATA, rounds=1)
    models = [own(result, c.id) for c in DATA]
    for n, found in run_of(result).state.memory["map_prior"].items():
        theta = torch.stack([m[n] for m in models]).reshape(len(models), -1).numpy()
        for i in range(0, theta.shape[1], 7):
            column = theta[:, i]

            def value(at: np.ndarray, column: np.ndarray = column) -> float:
                mu, s = at
                spread = ((column - mu) ** 2).mean()
                return spread / (2 * (s + 1)) + eps * (mu**2 + s**2) if s > -1 else math.inf

            mu, s = scalar_minimum(value, [float(column.mean()), 0.0])
            assert float(shared(result)[n].flatten()[i]) == pytest.approx(mu, abs=1e-6)
            assert float(found.flatten()[i]) == pytest.approx(s, abs=1e-6)


def test_laplace_with_its_implicit_step() -> None:
    b, lr = 2.0, 0.1
    model = naive.initial(mlp())
    gamma, mine = naive.state(model), {}
    for r in range(1, ROUNDS + 1):
        ends = []
        for client in naive.cohort(DATA, r, SIZE):
            net = naive.clone(model)
            net.load_state_dict(mine.get(client.id, gamma))
            for index in naive.order(client, r):
                naive.train(net, client, [index])
                with torch.no_grad():
                    for n, p in net.named_parameters():
                        d = p - gamma[n]
                        p.copy_(gamma[n] + torch.where(d.abs() > lr / b, d - d.sign() * lr / b, torch.zeros_like(d)))
            mine[client.id] = naive.state(net)
            ends.append(mine[client.id])
        # Three equal weights: the middle value.
        gamma = {n: torch.stack([e[n] for e in ends]).median(0).values for n in gamma}
    result = fit(fl.fedmap(prior=fl.laplace(b=b), omega="uniform"), mlp(), DATA, rounds=ROUNDS, cohort=SIZE)
    check(result, gamma, mine)


def test_student_t() -> None:
    nu, tau2 = 2.0, 0.05

    def penalty(n: str, d: Tensor, e: State) -> Tensor:
        return (nu + 1) / 2 * torch.log(1 + d**2 / (nu * tau2)).sum()

    def weighted(gamma: State, ends: list[State], weights: list[float], extra: State) -> State:
        found = {}
        for n in gamma:
            at = gamma[n].clone()
            for _ in range(500):
                a = [w * (nu + 1) / (nu * tau2 + (e[n] - at) ** 2) for w, e in zip(weights, ends, strict=True)]
                at = sum(x * e[n] for x, e in zip(a, ends, strict=True)) / sum(a)
            found[n] = at
        return found

    gamma, mine, _ = fedmap(mlp(), penalty, weighted)
    check(run(mlp(), prior=fl.student_t(nu=nu, tau2=tau2)), gamma, mine)


# Appendix A.4 ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def a4():  # type: ignore[no-untyped-def]
    """The script that reproduces the appendix."""
    path = Path(__file__).parents[2] / "papers" / "fedmap" / "a4.py"
    spec = importlib.util.spec_from_file_location("fedmap_a4", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_a4_has_the_published_shape_but_not_the_published_digits(a4) -> None:  # type: ignore[no-untyped-def]
    """mu_a near -1 where the pooled slope is positive, and a much wider prior on b than on a."""
    found = a4.study(12)
    exact, error = found["exact"], found["error"]
    assert -1.3 < exact["mu_a"] < -0.6
    assert exact["alpha_a"] / exact["alpha_b"] > 5
    assert exact["pooled slope"] > 1
    assert exact["mu_a"] == pytest.approx(-0.87, abs=0.1)
    assert exact["s_b"] == pytest.approx(49.8, abs=5)
    # Figure 3: the small clients gain by the prior, and lose by Ditto's.
    for client in (1, 2, 3):
        assert error["FedMAP"][client] < error["Ditto, sigma 0.1"][client] - 0.5
    assert a4.stationary_spread(a4.PUBLISHED["s_b"]) == pytest.approx(381, abs=1)
    assert "published" in a4.table(found)


def test_a4_is_what_the_method_computes(a4) -> None:  # type: ignore[no-untyped-def]
    """One round of ``fl.fit`` on the appendix's data against its exact iteration."""
    rows = a4.draw(0)
    start = torch.tensor([0.4, -0.3], dtype=torch.float64)
    expected = a4.fedmap(rows, start, rounds=1)
    data = fl.Federation.from_arrays([((d[:, :1], y), (d[:, :1], y)) for d, y in rows])
    model = nn.Linear(1, 1).double()
    with torch.no_grad():
        model.weight.fill_(0.4)
        model.bias.fill_(-0.3)
    squares = fl.Task(lambda out, y: (out[:, 0] - y) ** 2, primary="loss", higher_is_better=False)
    method = fl.fedmap(prior=fl.learnable_gaussian(eps=1e-4), omega="n")
    options = {"task": squares, "rounds": 1, "epochs": 700, "batch_size": "full", "optimizer": fl.sgd(lr=0.04)}
    result = fit(method, model, data, **options)
    assert torch.allclose(torch.cat([v.flatten() for v in shared(result).values()]), expected.mu, atol=1e-6)
    learnt = run_of(result).state.memory["map_prior"]
    assert torch.allclose(torch.cat([v.flatten() for v in learnt.values()]), expected.s, rtol=1e-5)
