"""FedLAG once more from its Algorithms 1 and 2, in plain PyTorch: one dictionary of models, one loop over pairs."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

import fedloom as fl
from tests.helpers import bn_mlp, federation, fit, gap, own, run_of, shared
from tests.oracles import naive

DATA = federation((9, 14, 5, 8, 11), seed=3)
ROUNDS = 4


def deep() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)
    )


def bn_deep() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5, bias=False), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 4), nn.Linear(4, 3))


def groups(model: nn.Module, granularity: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            names = [f"{name}.{p}" for p, _ in module.named_parameters()]
            if granularity == "layer":
                found[name] = names
            else:
                found |= {n: [n] for n in names}
    return found


def cosine(a: Tensor, b: Tensor) -> float:
    if float(a.norm()) == 0 or float(b.norm()) == 0:
        return 0.0
    return round(float(a @ b / (a.norm() * b.norm())), 10)


def fedlag(make, k, xi, granularity, weights, schedule, warmup, score, size):  # type: ignore[no-untyped-def]
    """The clients' start models for the next round, the server's model, and the scores of every round."""
    model = naive.initial(make)
    server = naive.state(model)
    bn = any(isinstance(m, nn.BatchNorm1d) for m in model.modules())
    layers = groups(model, granularity)
    personal: set[str] = set()
    mine: dict[str, dict[str, Tensor]] = {}
    matrix = []
    totals = dict.fromkeys(layers, 0.0)
    for r in range(1, ROUNDS + 1):
        ends, moves, rows = [], [], []
        for client in naive.cohort(DATA, r, size):
            begin = dict(server)
            begin |= {n: mine[client.id][n] for n in personal if client.id in mine}
            net = naive.clone(model)
            net.load_state_dict(begin)
            naive.train(net, client, naive.order(client, r, bn=bn))
            end = naive.state(net)
            ends.append(end)
            moves.append({n: torch.cat([(end[p] - begin[p]).flatten() for p in ps]) for n, ps in layers.items()})
            rows.append(float(len(client.train)))
            mine[client.id] = end
        scores = {}
        for name in layers:
            if score == "conflict":
                scores[name] = sum(cosine(a[name], b[name]) < xi for a, b in itertools.combinations(moves, 2))
            else:
                centre = sum(m[name] for m in moves) / len(moves)
                scores[name] = float(sum(((m[name] - centre) ** 2).sum() for m in moves) / len(moves))
            totals[name] += scores[name]
        matrix.append(scores)
        average = naive.average(ends, [1.0] * len(ends) if weights == "uniform" else rows)
        by_rows = naive.average(ends, rows)
        server = {n: by_rows[n] if n.split(".")[-1].startswith(("running", "num")) else v for n, v in average.items()}
        if schedule == "per_round" or (schedule == "warmup_then_per_round" and r >= warmup):
            used = scores
        elif schedule == "warmup_once" and r == warmup + 1:
            used = totals
        else:
            continue
        deepest_first = list(layers)[::-1]
        order = sorted(deepest_first, key=lambda n: -used[n])
        personal = {p for n in [n for n in order if used[n] > 0][:k] for p in layers[n]}
    starts = {c: {**server, **{n: v[n] for n in personal}} for c, v in mine.items()}
    return starts, server, matrix


CASES = {
    "algorithm 1": {"k": 2},
    "xi": {"k": 2, "xi": -0.1},
    "tensors": {"k": 3, "granularity": "tensor"},
    "samples": {"k": 1, "weights": "samples"},
    "once": {"k": 2, "schedule": "warmup_once", "warmup": 1},
    "warm-up": {"k": 2, "schedule": "warmup_then_per_round", "warmup": 2},
    "variance": {"k": 2, "score": "variance"},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("size", [3, 5])
@pytest.mark.parametrize("make", [deep, bn_deep])
def test_fedlag(case: str, size: int, make) -> None:  # type: ignore[no-untyped-def]
    options = {"xi": 0.0, "granularity": "layer", "weights": "uniform", "schedule": "per_round", "warmup": 30}
    options |= {"score": "conflict"} | CASES[case]
    starts, server, matrix = fedlag(make, size=size, **options)
    result = fit(fl.fedlag(**options), make, DATA, rounds=ROUNDS, cohort=size)
    for record, scores in zip(result.history, matrix, strict=True):
        assert record["lag"]["score"] == pytest.approx(scores, rel=1e-9)
    # The server keeps the mean of personal layers too, for newcomers.
    floats = {k: v for k, v in server.items() if v.is_floating_point()}
    assert gap(floats, {k: shared(result)[k] for k in floats}) < 1e-10
    for client, start in starts.items():
        mine = own(result, client)
        assert gap({k: start[k] for k in floats}, {k: mine[k] for k in floats}) < 1e-10
    if case == "algorithm 1":
        assert any(h["lag"]["personal"] for h in result.history), "the case must exercise personal layers"


def test_newcomers_start_from_the_mean_and_are_sent_it() -> None:
    result = fit(fl.fedlag(k=4, xi=2.0), deep, DATA, rounds=3, cohort=2)
    everything = 8 * sum(p.numel() for p in deep().parameters())
    met: set[str] = set()
    for record in result.history:
        fresh = set(record["clients"]) - met
        expected = everything * len(fresh) if record["round"] > 1 else everything * 2
        assert record["bytes_down"] == expected
        assert record["bytes_up"] == everything * 2
        met |= fresh


def test_fedavg_then_local() -> None:
    model = naive.initial(deep)
    for r in (1, 2):
        ends, rows, anchor = [], [], naive.state(model)
        for client in DATA:
            net = naive.clone(model)
            naive.train(net, client, naive.order(client, r))
            ends.append(naive.state(net))
            rows.append(float(len(client.train)))
        moved = naive.average(ends, rows)
        model.load_state_dict({k: anchor[k] + (moved[k] - anchor[k]) for k in anchor})
    models = {c.id: naive.clone(model) for c in DATA}
    for r in (3, 4):
        for client in DATA:
            naive.train(models[client.id], client, naive.order(client, r))
    result = fit(fl.fedavg_then_local(rounds=2), deep, DATA, rounds=4)
    assert [h["bytes_up"] > 0 for h in result.history] == [True, True, False, False]
    for client in DATA:
        assert gap(naive.state(models[client.id]), own(result, client.id)) < 1e-10
    assert run_of(result).state.round == 4


def test_normalisation_can_be_personal() -> None:
    result = fit(fl.fedlag(k=0, norm="personal"), bn_mlp(), DATA, rounds=2)
    reference = fit(fl.fedbn(weight="uniform"), bn_mlp(), DATA, rounds=2)
    for client in DATA:
        a, b = own(result, client.id), own(reference, client.id)
        assert all(torch.equal(a[k], b[k]) for k in a)
