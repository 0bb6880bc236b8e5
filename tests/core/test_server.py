"""Reducers, what is accepted, bytes, and the records of a round."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import fedloom as fl
from fedloom.reducers import maximum, mean, ratio, stack, total
from fedloom.sampling import cohort_size, sample
from fedloom.slots import ServerStage, Stage
from tests.helpers import bn_mlp, federation, fit, mlp, run_of

DATA = federation((9, 14, 5, 8))


def messages(*values: float) -> list[dict[str, dict[str, torch.Tensor]]]:
    return [{"e": {"a": torch.tensor([v, -v])}, "q": {"weight": torch.tensor(v)}} for v in values]


def test_reducers_by_hand() -> None:
    three = messages(1.0, 2.0, 6.0)
    rows = [1, 1, 2]
    assert mean().reduce("e", three, rows)["a"].tolist() == [3.75, -3.75]
    assert mean("uniform").reduce("e", three, rows)["a"].tolist() == [3.0, -3.0]
    assert mean("q").reduce("e", three, rows)["a"][0] == pytest.approx((1 + 4 + 36) / 9)
    weights = [math.exp(v) for v in (1, 2, 6)]
    expected = sum(w * v for w, v in zip(weights, (1, 2, 6), strict=True)) / sum(weights)
    assert mean("q", log=True).reduce("e", three, rows)["a"][0] == pytest.approx(expected)
    assert total().reduce("e", three, rows)["a"].tolist() == [9.0, -9.0]
    assert maximum().reduce("e", three, rows)["a"].tolist() == [6.0, -1.0]
    assert stack().reduce("e", three, rows)["a"].shape == (3, 2)


def test_rows_of_one_tensor_are_stacked_as_they_are_read() -> None:
    """Without a copy where they lie in order; a client's part that is turned round begins where the plain one does."""
    whole = torch.randn(4, 3, 3)
    for rows, same in ((whole.unbind(), True), (whole.mT.unbind(), False), (whole.unbind()[::-1], False)):
        stacked = stack().reduce("e", [{"e": {"a": row}} for row in rows], [1] * 4)["a"]
        assert torch.equal(stacked, torch.stack(list(rows)))
        assert (stacked.data_ptr() == whole.data_ptr()) == same


def test_logarithmic_weights_do_not_underflow() -> None:
    far = messages(-5000.0, -5001.0)
    assert mean("q", log=True).weights(far, [1, 1]) == pytest.approx([1 / (1 + math.exp(-1)), 1 / (1 + math.e)])


def test_ratio_by_hand() -> None:
    parts = [
        {"p": {"sum": torch.tensor([[0.0], [5.0], [0.0]]), "count": torch.tensor([1.0, 1.0, 0.0])}},
        {"p": {"sum": torch.tensor([[12.0], [0.0], [0.0]]), "count": torch.tensor([3.0, 0.0, 0.0])}},
    ]
    found = ratio().reduce("p", parts, [1, 1])
    assert found["mean"].flatten().tolist() == [3.0, 5.0, 0.0]
    assert found["count"].tolist() == [4.0, 1.0, 0.0]


def test_weights_that_add_up_to_nothing_are_an_error() -> None:
    with pytest.raises(fl.RunError, match="add up to 0"):
        mean("q").reduce("e", messages(0.0, 0.0), [1, 1])


@pytest.mark.parametrize(
    ("cohort", "clients", "size"), [(0.1, 7, 1), (0.25, 10, 3), (1, 10, 1), (1.0, 10, 10), (10, 10, 10), (0.001, 5, 1)]
)
def test_cohort_sizes(cohort: float, clients: int, size: int) -> None:
    assert cohort_size(cohort, clients) == size


@pytest.mark.parametrize("cohort", [0, 1.5, True, 11, -0.1, "all", float("nan")])
def test_bad_cohorts(cohort: object) -> None:
    with pytest.raises(fl.UserError, match="cohort"):
        cohort_size(cohort, 10)  # type: ignore[arg-type]


def test_samples_are_in_federation_order_and_uniform() -> None:
    ids = tuple(str(i) for i in range(12))
    seen = np.zeros(12)
    for r in range(600):
        chosen = sample(0, r, ids, 4)
        assert len(set(chosen)) == 4
        assert [ids.index(i) for i in chosen] == sorted(ids.index(i) for i in chosen)
        for i in chosen:
            seen[ids.index(i)] += 1
    assert seen.min() > 150


def poison(method: fl.Method, where: str) -> fl.Method:
    """Client ``where`` (by its number of rows) sends a NaN."""
    rows = float(len(DATA[where].train))

    def fn(message, memory, seen):  # type: ignore[no-untyped-def]
        bad = torch.where(seen.n == rows, torch.nan, 0.0)
        return {**message, "delta": {k: v + bad for k, v in message["delta"].items()}}, memory

    return method.adding(stages=(Stage(owner="poison", fn=fn),))


@pytest.mark.parametrize("engine", ["loop", "vectorised"])
def test_a_bad_reply_is_rejected_and_its_client_rolled_back(engine: str) -> None:
    result = fit(poison(fl.fedper(), "2"), mlp(), DATA, engine=engine)
    for record in result.history:
        (found,) = record["rejected"]
        assert found["client"] == "2"
        assert found["round"] == record["round"]
        assert "not finite" in found["reason"]
    assert "2" not in run_of(result).clients
    clean = fit("fedper", mlp(), DATA.subset(["0", "1", "3"]), engine=engine)
    for name, value in run_of(clean).state.leaves.items():
        torch.testing.assert_close(value, run_of(result).state.leaves[name], rtol=1e-12, atol=1e-12)


def test_all_replies_bad_stops_the_run() -> None:
    method = fl.fedavg()
    for client in DATA:
        method = poison(method, client.id)
    with pytest.raises(fl.RunError, match=r"round 1: no reply could be used .*client 0"):
        fit(method, mlp(), DATA)


@pytest.mark.parametrize("engine", ["loop", "vectorised"])
def test_server_stages_never_act_on_a_reply_that_is_rejected(engine: str) -> None:
    """Vectorised clients are reduced before it is known whether all are finite; where one is not, it is done again."""

    def strict(reduced, memory, cohort):  # type: ignore[no-untyped-def]
        if not all(v.isfinite().all() for v in reduced["delta"].values()):
            raise ArithmeticError("a stage that cannot bear a NaN")
        return reduced, {"rows": memory["rows"] + sum(cohort.rows)}

    stage = ServerStage(owner="strict", fn=strict, memory=lambda facts: {"rows": torch.zeros((), dtype=torch.int64)})
    result = fit(poison(fl.fedavg().adding(server=(stage,)), "2"), mlp(), DATA, engine=engine, rounds=3)
    assert [r["client"] for record in result.history for r in record["rejected"]] == ["2"] * 3
    counted = run_of(result).state.memory["strict"]["rows"]
    assert int(counted) == 3 * sum(len(c.train) for c in DATA if c.id != "2")


@pytest.mark.parametrize("engine", ["loop", "vectorised"])
def test_a_stage_decides_by_what_it_asked_of_the_accepted_replies(engine: str) -> None:
    """Once a round, by the numbers of the aggregate that is kept: not by those of one in which a reply is not finite."""
    heard: list[dict[str, float]] = []

    def ask(reduced, memory, cohort):  # type: ignore[no-untyped-def]
        clients = torch.tensor(len(cohort), dtype=torch.int64)
        asked = {"size": max(v.abs().max() for v in reduced["delta"].values()), "clients": clients}
        return {**reduced, "asked": asked}, {**memory, "seen": memory["seen"] + 1}

    def decide(memory, told, cohort):  # type: ignore[no-untyped-def]
        heard.append(dict(told))
        assert int(memory["seen"]) == cohort.round
        return {"most": torch.tensor(max(float(memory["most"]), told["size"]), dtype=torch.float64)}

    def begin(facts):  # type: ignore[no-untyped-def]
        return {"seen": torch.zeros((), dtype=torch.int64), "most": torch.zeros((), dtype=torch.float64)}

    # A stage that comes later sees nothing of what was asked.
    late = ServerStage(owner="late", fn=lambda r, m, c: (r, m) if "asked" not in r else ({}, m))
    method = fl.fedavg().adding(server=(ServerStage(owner="odd", fn=ask, memory=begin, decide=decide), late))
    for chosen, clients in ((method, 4), (poison(method, "2"), 3)):
        heard.clear()
        state = run_of(fit(chosen, mlp(), DATA, engine=engine, rounds=3)).state
        rounds = heard[-3:]  # an engine may have been tried before
        assert [told["clients"] for told in rounds] == [clients] * 3
        assert 0 < float(state.memory["odd"]["most"]) == max(told["size"] for told in rounds)
        assert int(state.memory["odd"]["seen"]) == 3


@pytest.mark.parametrize("engine", ["loop", "vectorised"])
def test_what_clients_send_is_no_question_of_a_stage_that_decides_nothing(engine: str) -> None:
    heard: list[list[float]] = []

    def send(message, memory, seen):  # type: ignore[no-untyped-def]
        return {**message, "asked": {"rows": torch.stack([seen.n, -seen.n])}}, memory

    def hear(reduced, memory, cohort):  # type: ignore[no-untyped-def]
        heard.append(reduced["asked"]["rows"].tolist())
        return reduced, memory

    method = fl.fedavg().adding(
        stages=(Stage(owner="told", fn=send, entries={"asked": total()}),),
        server=tuple(ServerStage(owner=owner, fn=hear) for owner in ("one", "two")),
    )
    fit(method, mlp(), DATA, engine=engine, rounds=1)
    assert heard[-2:] == [[36.0, -36.0]] * 2


@pytest.mark.parametrize("engine", ["loop", "vectorised"])
def test_a_server_stage_that_breaks_the_model_stops_the_run(engine: str) -> None:
    stage = ServerStage(
        owner="boom", fn=lambda r, m, c: ({**r, "delta": {k: v * torch.inf for k, v in r["delta"].items()}}, m)
    )
    with pytest.raises(fl.RunError, match="no longer finite"):
        fit(fl.fedavg().adding(server=(stage,)), mlp(), DATA, engine=engine)


def test_bytes_are_those_of_the_tensors_sent() -> None:
    size = {
        n: v.numel() * v.element_size() for n, v in run_of(fit("local", bn_mlp(), DATA, rounds=1)).bound.start.items()
    }
    head = size["3.weight"] + size["3.bias"]
    parameters = sum(v for n, v in size.items() if "running" not in n and "num" not in n)
    cases = {
        "local": (0, 0),
        "fedavg": (sum(size.values()), sum(size.values())),
        "fedper": (sum(size.values()) - head,) * 2,
        "scaffold": (sum(size.values()) + parameters,) * 2,
    }
    for method, (up, down) in cases.items():
        record = fit(method, bn_mlp(), DATA, rounds=1, cohort=3).history[0]
        assert (record["bytes_up"], record["bytes_down"]) == (3 * up, 3 * down), method


def test_records_of_a_round() -> None:
    result = fit("fedavg", mlp(), DATA, cohort=2)
    assert [r["round"] for r in result.history] == [1, 2, 3]
    last = result.history[-1]
    values = [c.metrics["accuracy"] for c in result.clients.values()]
    assert last["accuracy"] == pytest.approx(np.mean(values))
    assert last["accuracy_std"] == pytest.approx(np.std(values))
    assert last["accuracy_worst10"] == min(values)  # type: ignore[type-var]
    rows = [c.metrics["n_test"] for c in result.clients.values()]
    assert last["accuracy_weighted"] == pytest.approx(np.average(values, weights=rows))  # type: ignore[arg-type]
    assert last["global_accuracy"] == pytest.approx(last["accuracy_weighted"])
    assert result.clients[2] is result.clients["2"]
    for key in ("loss", "train_loss", "seconds", "seconds_eval", "seconds_total", "skipped", "rejected", "mode"):
        assert key in last
