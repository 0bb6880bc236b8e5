"""Server rules, each once more from its paper: FedAvgM, FedAdam, FedYogi, FedExP, FedNova, q-FedAvg."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fedloom as fl
from tests.helpers import bn_mlp, federation, fit, gap, mlp, run_of, shared
from tests.oracles import naive

ROUNDS, SIZE, LR = 3, 3, 0.1
DATA = federation((9, 14, 5, 8))
State = dict[str, Tensor]


def close(expected: State, found: State) -> None:
    floats = {k: v for k, v in expected.items() if v.is_floating_point()}
    assert gap(floats, {k: found[k] for k in floats}) < 1e-10


def replay(
    make: Callable[[], Any],
    rule: Callable[[State, list[State], list[Any], dict[str, Any]], State],
    momentum: float = 0.0,
) -> tuple[State, State]:
    """Rounds of plain local SGD; ``rule(w, thetas, clients, facts)`` gives the new parameters; buffers are averaged."""
    model = naive.initial(make)
    before = naive.state(model)
    names = [n for n, _ in model.named_parameters()]
    bn = len(names) < len(before)
    for r in range(1, ROUNDS + 1):
        before = naive.state(model)
        people = naive.cohort(DATA, r, SIZE)
        states, steps, losses = [], [], []
        for client in people:
            mine = naive.clone(model)
            x, y = naive.rows(client)
            mine.eval()
            losses.append(float(F.cross_entropy(mine(x), y).detach()))
            mine.train()
            optimizer = torch.optim.SGD(mine.parameters(), lr=LR, momentum=momentum)
            order = naive.order(client, r, bn=bn)
            for index in order:
                optimizer.zero_grad()
                naive.cross_entropy(mine, x[index], y[index]).backward()
                optimizer.step()
            states.append(naive.state(mine))
            steps.append(len(order))
        new = naive.average(states, [float(len(c.train)) for c in people])
        new.update(rule({n: before[n] for n in names}, states, people, {"steps": steps, "losses": losses}))
        model.load_state_dict(new)
    return naive.state(model), before


def mean_update(w: State, states: list[State], people: list[Any]) -> State:
    rows = [float(len(c.train)) for c in people]
    return {n: sum(k / sum(rows) * (s[n] - w[n]) for k, s in zip(rows, states, strict=True)) for n in w}  # type: ignore[misc]


def run(method: fl.Method, make: Callable[[], Any], **options: Any) -> fl.Result:
    return fit(method, make, DATA, rounds=ROUNDS, cohort=SIZE, **options)


@pytest.mark.parametrize("make", [mlp(), bn_mlp()])
def test_fedavgm(make: Callable[[], Any]) -> None:
    v: State = {}

    def rule(w: State, states: list[State], people: list[Any], facts: dict[str, Any]) -> State:
        for n, d in mean_update(w, states, people).items():
            v[n] = 0.7 * v.get(n, torch.zeros_like(d)) + d
        return {n: w[n] + 0.5 * v[n] for n in w}

    expected, _ = replay(make, rule)
    close(expected, shared(run(fl.fedavgm(0.7, 0.5), make)))


@pytest.mark.parametrize("name", ["fedadam", "fedyogi"])
@pytest.mark.parametrize("make", [mlp(), bn_mlp()])
def test_adaptive(name: str, make: Callable[[], Any]) -> None:
    eta_s, b1, b2, tau = 0.03, 0.8, 0.95, 0.01
    m: State = {}
    v: State = {}

    def rule(w: State, states: list[State], people: list[Any], facts: dict[str, Any]) -> State:
        new = {}
        for n, d in mean_update(w, states, people).items():
            m[n] = b1 * m.get(n, torch.zeros_like(d)) + (1 - b1) * d
            old = v.get(n, torch.full_like(d, tau**2))
            v[n] = b2 * old + (1 - b2) * d * d if name == "fedadam" else old - (1 - b2) * d * d * (old - d * d).sign()
            new[n] = w[n] + eta_s * m[n] / (v[n].sqrt() + tau)
        return new

    expected, _ = replay(make, rule)
    close(expected, shared(run(getattr(fl, name)(eta_s, b1, b2, tau), make)))


@pytest.mark.parametrize("make", [mlp(), bn_mlp()])
def test_fedexp(make: Callable[[], Any]) -> None:
    lengths = []

    def rule(w: State, states: list[State], people: list[Any], facts: dict[str, Any]) -> State:
        moves = [torch.cat([(s[n] - w[n]).flatten() for n in w]) for s in states]
        mean = torch.stack(moves).mean(0)
        eta_g = max(1.0, float(sum((d @ d) for d in moves) / (2 * len(moves) * (mean @ mean + 1e-6))))
        lengths.append(eta_g)
        return {n: w[n] + eta_g * sum(s[n] - w[n] for s in states) / len(states) for n in w}  # type: ignore[operator]

    expected, before = replay(make, rule)
    result = run(fl.fedexp(1e-6), make)
    close(expected, shared(result))
    assert max(lengths) > 1
    tested = run_of(result).desk("0").leaves
    for n in dict(naive.initial(make).named_parameters()):
        torch.testing.assert_close(tested[n], (expected[n] + before[n]) / 2, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("rho", [0.0, 0.9])
def test_fednova(rho: float) -> None:
    def rule(w: State, states: list[State], people: list[Any], facts: dict[str, Any]) -> State:
        rows = [len(c.train) for c in people]
        p = [n / sum(rows) for n in rows]
        a = []
        for steps in facts["steps"]:
            total, velocity = 0.0, 0.0
            for _ in range(steps):
                velocity = rho * velocity + 1
                total += velocity
            a.append(total)
        factor = sum(pk * ak for pk, ak in zip(p, a, strict=True))
        return {
            n: w[n] + factor * sum(pk * (s[n] - w[n]) / ak for pk, ak, s in zip(p, a, states, strict=True)) for n in w
        }

    expected, _ = replay(mlp(), rule, rho)
    close(expected, shared(run(fl.fednova(), mlp(), optimizer=fl.sgd(LR, momentum=rho))))


@pytest.mark.parametrize("q", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("make", [mlp(), bn_mlp()])
def test_qfedavg(q: float, make: Callable[[], Any]) -> None:
    def rule(w: State, states: list[State], people: list[Any], facts: dict[str, Any]) -> State:
        top = {n: torch.zeros_like(v) for n, v in w.items()}
        bottom = 0.0
        for s, loss in zip(states, facts["losses"], strict=True):
            gradient = {n: (w[n] - s[n]) / LR for n in w}
            square = sum(float((g * g).sum()) for g in gradient.values())
            bottom += q * loss ** (q - 1) * square + loss**q / LR
            top = {n: top[n] + loss**q * gradient[n] for n in w}
        return {n: w[n] - top[n] / bottom for n in w}

    expected, _ = replay(make, rule)
    close(expected, shared(run(fl.qfedavg(q), make)))
