"""The first eight methods, each once more from its paper, in plain PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fedloom as fl
from tests.helpers import bn_mlp, federation, fit, gap, mlp, own, run_of, shared
from tests.oracles import naive

ROUNDS, SIZE = 3, 2
DATA = federation((9, 14, 5, 8))


def close(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> None:
    floats = {k: v for k, v in expected.items() if v.is_floating_point()}
    assert gap(floats, {k: found[k] for k in floats}) < 1e-10
    for k in set(expected) - set(floats):
        assert torch.equal(expected[k], found[k])


def run(method: str | fl.Method, make=None, **options):  # type: ignore[no-untyped-def]
    return fit(method, make or mlp(), DATA, rounds=ROUNDS, cohort=SIZE, **options)


def test_local() -> None:
    models = {c.id: naive.initial(mlp()) for c in DATA}
    for r in range(1, ROUNDS + 1):
        for client in naive.cohort(DATA, r, SIZE):
            naive.train(models[client.id], client, naive.order(client, r))
    result = run("local")
    for name, model in models.items():
        close(naive.state(model), own(result, name))


@pytest.mark.parametrize("mu", [0.0, 0.7])
@pytest.mark.parametrize("weight", ["n", "uniform"])
def test_fedavg_and_fedprox(mu: float, weight: str) -> None:
    model = naive.initial(mlp())
    for r in range(1, ROUNDS + 1):
        states, weights, anchor = [], [], naive.state(model)
        for client in naive.cohort(DATA, r, SIZE):
            mine = naive.clone(model)

            def loss(m, x, y, anchor=anchor):  # type: ignore[no-untyped-def]
                return naive.cross_entropy(m, x, y) + mu / 2 * naive.square_distance(m, anchor)

            naive.train(mine, client, naive.order(client, r), loss)
            states.append(naive.state(mine))
            weights.append(float(len(client.train)) if weight == "n" else 1.0)
        model.load_state_dict(naive.average(states, weights))
    method = fl.compose(fl.fedavg(weight), fl.proximal(mu))
    close(naive.state(model), shared(run(method)))


def test_fedavg_with_batch_norm_averages_buffers() -> None:
    make = bn_mlp()
    model = naive.initial(make)
    for r in range(1, ROUNDS + 1):
        states, weights = [], []
        for client in naive.cohort(DATA, r, SIZE):
            mine = naive.clone(model)
            naive.train(mine, client, naive.order(client, r, bn=True))
            states.append(naive.state(mine))
            weights.append(float(len(client.train)))
        model.load_state_dict(naive.average(states, weights))
    close(naive.state(model), shared(run("fedavg", make)))


def test_fedbn() -> None:
    make = bn_mlp()
    names = {f"1.{k}" for k in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")}
    model = naive.initial(make)
    kept = {c.id: {k: v for k, v in naive.state(model).items() if k in names} for c in DATA}
    for r in range(1, ROUNDS + 1):
        states, weights = [], []
        for client in naive.cohort(DATA, r, SIZE):
            mine = naive.clone(model)
            mine.load_state_dict(kept[client.id], strict=False)
            naive.train(mine, client, naive.order(client, r, bn=True))
            full = naive.state(mine)
            kept[client.id] = {k: full[k] for k in names}
            states.append({k: v for k, v in full.items() if k not in names})
            weights.append(float(len(client.train)))
        model.load_state_dict(naive.average(states, weights), strict=False)
    result = run("fedbn", make)
    close(naive.state(model), shared(result))
    for client in DATA:
        close(naive.state(model) | kept[client.id], own(result, client.id))


@pytest.mark.parametrize("eta_g", [1.0, 0.5])
def test_scaffold(eta_g: float) -> None:
    lr = 0.1
    model = naive.initial(mlp())
    zeros = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    c, c_k = dict(zeros), {client.id: dict(zeros) for client in DATA}
    for r in range(1, ROUNDS + 1):
        people = naive.cohort(DATA, r, SIZE)
        moves, changes = [], []
        for client in people:
            mine, before = naive.clone(model), naive.state(model)
            x, y = naive.rows(client)
            steps = naive.order(client, r)
            for index in steps:
                grads = torch.autograd.grad(naive.cross_entropy(mine, x[index], y[index]), list(mine.parameters()))
                with torch.no_grad():
                    for (n, p), g in zip(mine.named_parameters(), grads, strict=True):
                        p -= lr * (g - c_k[client.id][n] + c[n])
            after = naive.state(mine)
            new = {n: c_k[client.id][n] - c[n] + (before[n] - after[n]) / (len(steps) * lr) for n in c}
            moves.append({n: after[n] - before[n] for n in c})
            changes.append({n: new[n] - c_k[client.id][n] for n in c})
            c_k[client.id] = new
        share = len(people) / len(DATA)
        with torch.no_grad():
            for n, p in model.named_parameters():
                p += eta_g * sum(m[n] for m in moves) / len(people)
        c = {n: c[n] + share * sum(m[n] for m in changes) / len(people) for n in c}
    result = run(fl.scaffold(eta_g))
    close(naive.state(model), shared(result))
    close(c, run_of(result).state.memory["control_variates"])
    for name, state in run_of(result).clients.items():
        close(c_k[name], state.memory["control_variates"])


@pytest.mark.parametrize("method", ["fedper", "fedrep", "fedrep(head_epochs=1)"])
def test_personal_head(method: str) -> None:
    make = bn_mlp()
    model = naive.initial(make)
    head = {"3.weight", "3.bias"}
    kept = {c.id: {k: v for k, v in naive.state(model).items() if k in head} for c in DATA}
    for r in range(1, ROUNDS + 1):
        states, weights = [], []
        for client in naive.cohort(DATA, r, SIZE):
            mine = naive.clone(model)
            mine.load_state_dict(kept[client.id], strict=False)
            if method == "fedper":
                naive.train(mine, client, naive.order(client, r, bn=True))
            else:
                assert isinstance(mine, nn.Sequential)
                mine[1].eval()
                epochs = 1 if "1" in method else 2
                naive.train(
                    mine,
                    client,
                    naive.order(client, r, stream="head", epochs=epochs, bn=True),
                    params=mine[3].parameters(),
                )
                mine[1].train()
                body = [*mine[0].parameters(), *mine[1].parameters()]
                naive.train(mine, client, naive.order(client, r, bn=True), params=body)
            full = naive.state(mine)
            kept[client.id] = {k: full[k] for k in head}
            states.append({k: v for k, v in full.items() if k not in head})
            weights.append(float(len(client.train)))
        model.load_state_dict(naive.average(states, weights), strict=False)
    result = run(method, make)
    close(naive.state(model), shared(result))
    for client in DATA:
        close(naive.state(model) | kept[client.id], own(result, client.id))


@pytest.mark.parametrize("lam", [0.0, 0.5])
def test_ditto(lam: float) -> None:
    model = naive.initial(mlp())
    personal = {c.id: naive.clone(model) for c in DATA}
    for r in range(1, ROUNDS + 1):
        states, weights, anchor = [], [], naive.state(model)
        for client in naive.cohort(DATA, r, SIZE):
            mine = naive.clone(model)
            naive.train(mine, client, naive.order(client, r))
            states.append(naive.state(mine))
            weights.append(float(len(client.train)))

            def loss(m, x, y, anchor=anchor):  # type: ignore[no-untyped-def]
                return naive.cross_entropy(m, x, y) + lam / 2 * naive.square_distance(m, anchor)

            naive.train(personal[client.id], client, naive.order(client, r, stream="own", epochs=3), loss)
        model.load_state_dict(naive.average(states, weights))
    result = run(fl.ditto(lam, personal_epochs=3))
    close(naive.state(model), shared(result))
    for name, v in personal.items():
        leaves = own(result, name)
        close({f"own/{k}": t for k, t in naive.state(v).items()}, leaves)
