"""Every number names its model, its rows, its moment and its clients."""

from __future__ import annotations

import math
import statistics
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedloom as fl
from fedloom.comparison.cross_validation import assignment, folded, t_quantile
from tests.helpers import bn_mlp, federation, mlp

SIZES = (9, 14, 5, 8, 7, 11, 6, 10, 9, 12, 5, 8)


def fit(method: str, **options: Any) -> fl.Result:
    options = {"model": mlp(), "data": federation(SIZES), "rounds": 3, "batch_size": 4, "progress": False} | options
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fl.fit(method, **options)


def accuracy(model: nn.Module, rows: Any) -> float:
    with torch.no_grad():
        return float((model(rows.x).argmax(1) == rows.y).double().mean())


@pytest.mark.parametrize("method", ["fedavg", "fedper", "ditto"])
def test_own_models_on_own_rows(method: str) -> None:
    result = fit(method)
    data, last = federation(SIZES), result.history[-1]
    own = {c.id: accuracy(result.model(c.id), c.test) for c in data}
    assert {n: c.metrics["accuracy"] for n, c in result.clients.items()} == pytest.approx(own)
    values = list(own.values())
    assert last["accuracy"] == pytest.approx(statistics.fmean(values))
    assert last["accuracy_std"] == pytest.approx(statistics.pstdev(values))
    assert last["accuracy_worst10"] == pytest.approx(statistics.fmean(sorted(values)[: math.ceil(len(values) / 10)]))
    weights = [len(c.test) for c in data if c.test is not None]
    assert last["accuracy_weighted"] == pytest.approx(np.average(values, weights=weights))
    if method == "fedper":
        assert last["global_accuracy"] is None, "a shared body without a head is no model"
    else:
        pooled = fl.data.concatenate([c.test for c in data if c.test is not None])
        assert last["global_accuracy"] == pytest.approx(accuracy(result.model(), pooled))


def test_before_and_after_are_of_the_clients_of_the_round() -> None:
    result = fit("fedavg", cohort=3, rounds=1, evaluate={"moments": ["before", "after", "end"]})
    data, record = federation(SIZES), result.history[0]
    start = fit("fedavg", rounds=1, optimizer=fl.sgd(lr=0.0)).model()
    chosen = [data[i] for i in record["clients"]]
    assert len(chosen) == 3
    assert record["accuracy_before"] == pytest.approx(statistics.fmean(accuracy(start, c.test) for c in chosen))
    alone = fit("local", cohort=3, rounds=1)
    assert record["clients"] == alone.history[0]["clients"]
    trained = statistics.fmean(accuracy(alone.model(c.id), c.test) for c in chosen)
    assert record["accuracy_after"] == pytest.approx(trained), "after local training, before the mean"
    without = fit("fedavg", cohort=3, rounds=1)
    assert "accuracy_before" not in without.history[0]
    assert without.history[0]["accuracy"] == record["accuracy"], "looking changes nothing"


def test_clients_without_test_rows_are_left_out_and_counted() -> None:
    data = federation((9, 14, 5))
    clients = [((c.train.x, c.train.y), None if c.id == "1" else (c.test.x, c.test.y)) for c in data if c.test]
    result = fit("fedper", data=fl.Federation.from_arrays(clients), evaluate={"moments": ["before", "after", "end"]})
    summary = result.summary()
    assert (summary.clients, summary.untested) == (2, 1)
    assert result.clients["1"].metrics == {}
    assert "clients without test rows" in str(summary)


def test_clients_that_never_took_part_are_shown_apart() -> None:
    with pytest.warns(UserWarning, match="never took part"):
        result = fl.fit("local", mlp(), federation(SIZES), rounds=2, cohort=1, epochs=20, batch_size=4, progress=False)
    last = result.history[-1]
    there = [c.metrics["accuracy"] for c in result.clients.values() if c.rounds]
    assert last["accuracy_participants"] == pytest.approx(statistics.fmean(v for v in there if v is not None))
    assert last["accuracy_participants"] != last["accuracy"]
    everyone = fit("local")
    assert "accuracy_participants" not in everyone.history[-1]


def test_best_round_is_chosen_on_validation_rows_where_there_are_any() -> None:
    data = fl.data.load("digits").partition(fl.dirichlet(0.5), clients=4, seed=0, val=0.3)
    result = fit("fedavg", model="mlp", data=data, rounds=4, optimizer=fl.sgd(lr=0.3))
    summary, by = result.summary(), [r["val_accuracy"] for r in result.history]
    assert summary.best_by == "validation rows"
    assert summary.best_round == by.index(max(by)) + 1
    assert summary.best_mean == result.history[by.index(max(by))]["accuracy"]
    assert fit("fedavg").summary().best_by == "test rows"


def test_early_stopping() -> None:
    data = fl.data.load("digits").partition(fl.iid(), clients=3, seed=0, val=0.3)
    result = fit("fedavg", model="mlp", data=data, rounds=9, optimizer=fl.sgd(lr=0.0), evaluate={"patience": 2})
    assert len(result.history) == 3, "round 1 is the best, two more without improvement"
    assert result.history[-1]["evaluated"] == 3


def test_a_callback_stops_the_run_and_everybody_is_evaluated() -> None:
    seen: list[int] = []

    def stop(record: dict[str, Any]) -> bool:
        seen.append(record["round"])
        return record["round"] == 2

    result = fit("fedavg", rounds=9, evaluate={"every": 0}, callbacks=[stop])
    assert seen == [1, 2]
    assert result.history[0]["accuracy"] is None
    assert result.history[-1]["evaluated"] == len(SIZES)


def test_evaluating_some() -> None:
    result = fit("fedavg", rounds=4, cohort=3, evaluate={"every": 2, "clients": 5})
    assert [r.get("evaluated") for r in result.history] == [None, 5, None, 12]
    sampled = fit("fedavg", rounds=2, cohort=3, evaluate={"clients": "sampled"})
    assert [r["evaluated"] for r in sampled.history] == [3, 12]


def test_new_clients_train_only_what_is_theirs() -> None:
    options: dict[str, Any] = {"rounds": 3, "optimizer": fl.sgd(lr=0.1)}
    result = fit("fedper", **options, evaluate={"holdout": 0.25, "adapt_epochs": 5})
    new = [n for n, c in result.clients.items() if c.new]
    assert len(new) == 3
    assert not {c for r in result.history for c in r["clients"]} & set(new)
    values = [result.clients[n].metrics["accuracy"] for n in new]
    assert result.history[-1]["new_accuracy"] == pytest.approx(statistics.fmean(v for v in values if v is not None))
    assert result.summary().new == result.history[-1]["new_accuracy"]
    data, shared = federation(SIZES), result.model()
    untrained = fit("fedper", **options, evaluate={"holdout": 0.25, "adapt_epochs": 0})
    for n in new:
        assert untrained.clients[n].metrics["accuracy"] == pytest.approx(accuracy(shared, data[n].test))
    losses = [statistics.fmean(r.clients[n].metrics["loss"] or 0 for n in new) for r in (result, untrained)]
    assert losses[0] != losses[1], "five epochs on the head change something"
    averaged = fit("fedavg", **options, evaluate={"holdout": 0.25, "adapt_epochs": 5})
    for n in new:
        assert averaged.clients[n].metrics["accuracy"] == pytest.approx(accuracy(averaged.model(), data[n].test))


@pytest.mark.parametrize("method", ["fedper", "fedavg", "ditto", "fedrod"])
def test_the_model_of_a_new_client_is_its_adapted_one(method: str, tmp_path: Path) -> None:
    """It gives the metrics that were reported of it, in this process and from disk."""
    data = fl.data.load("digits").partition(fl.dirichlet(0.5), clients=5, seed=0)
    table = {"name": "digits", "clients": 5, "partition": "dirichlet(0.5)", "seed": 0}
    result = fit(
        method,
        model="mlp",
        data=table,
        rounds=2,
        batch_size=32,
        evaluate={"holdout": 0.2, "adapt_epochs": 2},
        out=tmp_path / "run",
    )
    (name,) = [n for n, c in result.clients.items() if c.new]
    for found in (result, fl.load_run(tmp_path / "run")):
        assert accuracy(found.model(name), data[name].test) == pytest.approx(result.clients[name].metrics["accuracy"])
    if method != "fedrod":  # its models take a route of their own
        plain = result.model().state_dict()
        differs = any(not torch.equal(v, plain[k]) for k, v in result.model(name).state_dict().items())
        assert differs == (method != "fedavg")


@pytest.mark.parametrize("method", fl.list_methods())
def test_new_clients_of_every_method(method: str) -> None:
    model = bn_mlp() if method == "fedbn" else mlp()
    result = fit(
        method, model=model, data=federation((9, 8, 7, 9)), rounds=2, evaluate={"holdout": 0.25, "adapt_epochs": 1}
    )
    assert result.history[-1]["new_accuracy"] is not None


def test_bytes_are_those_of_the_tensors_sent() -> None:
    size = sum(p.numel() for p in mlp()().parameters()) * 4
    record = fit("fedavg", cohort=5).history[0]
    assert (record["bytes_up"], record["bytes_down"]) == (5 * size, 5 * size)
    assert record["bytes_up_by_kind"] == {"parameters": 5 * size}
    assert fit("local").history[0]["bytes_up"] == 0
    body = 4 * (6 * 5 + 5)
    assert fit("fedper", cohort=5).history[0]["bytes_up"] == 5 * body
    by_kind = fit("fedavg", model=bn_mlp(), cohort=5).history[0]["bytes_up_by_kind"]
    assert by_kind["buffers"] == 5 * (2 * 5 * 4 + 8), "running mean, running variance and the counter"


@pytest.mark.parametrize(("method", "policy"), [("fedavg", "averaged"), ("fedbn", "stay with the clients")])
def test_the_policy_for_running_statistics_is_shown(method: str, policy: str) -> None:
    summary = fit(method, model=bn_mlp()).summary()
    assert summary.buffers == policy
    assert policy in str(summary)


def test_gain_over_local() -> None:
    local, other = fit("local"), fit("fedavg")
    gain = fl.gain(other, local)
    for n, value in gain.clients.items():
        ours, theirs = other.clients[n].metrics["accuracy"], local.clients[n].metrics["accuracy"]
        assert ours is not None
        assert theirs is not None
        assert value == ours - theirs
    assert gain.mean == pytest.approx(statistics.fmean(gain.clients.values()))
    assert gain.helped == sum(v > 0 for v in gain.clients.values()) / len(SIZES)
    with pytest.raises(fl.UserError, match="different clients"):
        fl.gain(other, fit("local", data=federation((5, 6))))


def test_gain_is_positive_where_lower_is_better() -> None:
    def data() -> fl.Federation:
        x = np.random.default_rng(0).normal(size=(12, 2)).astype(np.float32)
        return fl.Federation.from_arrays([((x, x[:, 0]), (x, x[:, 0]))] * 2)

    model = lambda: nn.Linear(2, 1)  # noqa: E731
    bad = fit("local", model=model, data=data(), task="regression", optimizer=fl.sgd(lr=0.0))
    good = fit("local", model=model, data=data(), task="regression", epochs=20)
    assert fl.gain(good, bad).mean > 0
    assert good.summary().best_round is not None


def test_a_task_of_ones_own() -> None:
    task = fl.Task(
        lambda out, y: nn.functional.cross_entropy(out, y, reduction="none"),
        metrics=lambda out, y: {"top2": float((out.topk(2, 1)[1] == y[:, None]).any(1).double().mean())},
        primary="top2",
        higher_is_better=True,
    )
    result = fit("fedavg", task=task)
    own = [c.metrics["top2"] for c in result.clients.values()]
    assert result.history[-1]["top2"] == pytest.approx(statistics.fmean(v for v in own if v is not None))
    assert result.summary().metric == "top2"


# Folds -----------------------------------------------------------------------------------------------------


def test_folds_cover_every_row_once() -> None:
    data = federation((9, 14, 5))
    parts = [folded(data, 4, k, 0, 1) for k in range(4)]
    for client in data:
        total = len(client.train) + len(client.test or ())  # type: ignore[arg-type]
        tested = [p[client.id].test for p in parts]
        assert sum(len(t) for t in tested if t is not None) == total
        assert all(len(p[client.id].train) + len(p[client.id].test or ()) == total for p in parts)  # type: ignore[arg-type]


def test_folds_are_stratified() -> None:
    rows = fl.data.Rows(torch.zeros(40, 1), torch.tensor([0] * 20 + [1] * 20))
    dealt = assignment(rows, 4, np.random.default_rng(0))
    assert all(np.bincount(dealt[:20], minlength=4) == 5)
    assert all(np.bincount(dealt[20:], minlength=4) == 5)


def test_intervals() -> None:
    from scipy import stats

    for freedom in (1, 2, 4, 9, 29, 200):
        assert t_quantile(0.975, freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=1e-6)
    made = fl.cross_validate("fedavg", mlp(), federation((9, 14, 8)), folds=3, repeats=2, rounds=1, progress=False)
    values = [r.summary().mean for r in made.results]
    half = stats.t.ppf(0.975, 5) * math.sqrt(statistics.variance(v for v in values if v is not None) * (1 / 6 + 1 / 2))
    assert made.overall.high is not None
    assert made.overall.high - made.overall.mean == pytest.approx(half)
    assert len(made.results) == 6
    with pytest.raises(fl.UserError, match="folds=1"):
        fl.cross_validate("fedavg", mlp(), federation(), folds=1)
