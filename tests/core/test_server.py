"""Reducers, what is accepted, bytes, and the records of a round."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import fedloom as fl
from fedloom.rounds import server
from fedloom.rounds.sampling import cohort_size, sample
from fedloom.rounds.unseen_clients import held_out
from fedloom.spec.parts import Receive, Send, ServerStage, Stage, Term
from fedloom.spec.reducers import maximum, mean, ratio, stack, total
from fedloom.store.client_store import ClientStore
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
    """Replies are aggregated before it is known whether all are finite; where one is not, they are aggregated again."""

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
def test_a_stage_decides_by_the_accepted_replies(engine: str) -> None:
    """It may read values on the host. What it makes of a reply that is rejected is not kept."""

    def decide(reduced, memory, cohort):  # type: ignore[no-untyped-def]
        largest = max(v.abs().max().item() for v in reduced["delta"].values())
        return reduced, {"calls": memory["calls"] + 1, "most": torch.tensor(max(float(memory["most"]), largest))}

    def begin(facts):  # type: ignore[no-untyped-def]
        return {"calls": torch.zeros((), dtype=torch.int64), "most": torch.zeros(())}

    method = fl.fedavg().adding(server=(ServerStage(owner="odd", fn=decide, memory=begin),))
    for chosen in (method, poison(method, "2")):
        memory = run_of(fit(chosen, mlp(), DATA, engine=engine, rounds=3)).state.memory["odd"]
        assert int(memory["calls"]) == 3
        assert 0 < float(memory["most"]) < 10


def poison_memory(method: fl.Method, where: str, when: str = "round") -> fl.Method:
    """A client keeps a NaN in its memory, and sends nothing unusual."""
    rows = float(len(DATA[where].train))

    def fn(message, memory, seen):  # type: ignore[no-untyped-def]
        return message, {"value": memory["value"] + torch.where(seen.n == rows, torch.nan, 1.0)}

    begin = lambda facts: {"value": torch.zeros((), dtype=torch.float64)}  # noqa: E731
    return method.adding(stages=(Stage(owner="bad", fn=fn, memory=begin, when=when),))


@pytest.mark.parametrize("engine", ["loop", "vectorised"])
def test_a_client_memory_that_is_not_finite_is_rejected(engine: str) -> None:
    result = fit(poison_memory(fl.fedavg(), "2"), mlp(), DATA, engine=engine)
    for record in result.history:
        assert record["rejected"] == [
            {"client": "2", "round": record["round"], "reason": "its memory of bad['value'] is not finite"}
        ]
    assert "2" not in run_of(result).clients
    assert all(bool(s.memory["bad"]["value"] == 3) for s in run_of(result).clients.values())


@pytest.mark.parametrize("engine", ["loop", "vectorised"])
def test_a_loss_that_is_not_finite_is_rejected(engine: str) -> None:
    """Its gradient may be finite all the same."""
    rows = float(len(DATA["2"].train))

    def spoil(view, batch, seen):  # type: ignore[no-untyped-def]
        return torch.where(seen.n == rows, torch.inf, 0.0).to(view.loss().dtype)

    result = fit(fl.fedavg().adding(terms=(Term(owner="inf", fn=spoil),)), mlp(), DATA, engine=engine)
    for record in result.history:
        assert [(r["client"], r["reason"]) for r in record["rejected"]] == [("2", "its training loss is inf")]
        assert math.isfinite(record["train_loss"])


@pytest.mark.parametrize("engine", ["loop", "vectorised"])
@pytest.mark.parametrize("what", ["memory", "message"])
def test_a_setup_that_is_not_finite_is_an_error_and_stores_nothing(
    engine: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, stored = float(len(DATA["2"].train)), list[str]()

    def send(message, memory, seen):  # type: ignore[no-untyped-def]
        return {**message, "sum": {"n": torch.where(seen.n == rows, torch.nan, seen.n)}}, memory

    method = fl.fedavg()
    method = replace(method, schedule=replace(method.schedule, setup=(Receive(), Send())))
    if what == "memory":
        method = poison_memory(method, "2", "setup")
    else:
        method = method.adding(stages=(Stage(owner="sum", fn=send, entries={"sum": total()}, when="setup"),))
    put = ClientStore.__setitem__
    monkeypatch.setattr(ClientStore, "__setitem__", lambda self, k, v: stored.append(k) or put(self, k, v))
    with pytest.raises(fl.RunError, match=r"setup: .*client 2: .*is not finite"):
        fit(method, mlp(), DATA, engine=engine)
    assert not stored


@pytest.mark.parametrize("engine", ["loop", "vectorised"])
def test_a_setup_of_new_clients_that_is_not_finite_is_an_error(engine: str) -> None:
    (name,) = held_out(DATA, 0.25, 0)
    method = fl.fedavg()
    method = replace(method, schedule=replace(method.schedule, setup=(Receive(), Send())))
    method = poison_memory(method, name, "setup")
    with pytest.raises(fl.RunError, match=rf"setup of new clients: .*client {name}: its memory of bad.*not finite"):
        fit(method, mlp(), DATA, engine=engine, rounds=1, evaluate={"holdout": 0.25})


def test_a_missing_entry_is_rejected() -> None:
    """Whoever answers: the other replies are used."""
    run = run_of(fit("scaffold", mlp(), DATA, rounds=1))
    cohort = run.cohort(run.roster.ids, 2)
    run.state, sent = server.dispatch(run.bound, run.state, cohort)
    people = [run.participant(i, sent) for i in run.roster.ids]
    replies = run.engine.run_cohort(run.bound, run.work, run.bound.method.schedule.round, sent.post, people)
    replies[2] = replace(replies[2], message={"delta": replies[2].message["delta"]})
    replies[3] = replace(replies[3], fault="no answer")
    before = run.state
    pending = server.aggregate_replies(run.bound, before, replies, lambda ids: run.cohort(ids, 2))
    after, outcome = server.confirm(pending)
    assert [r.id for r in outcome.accepted] == ["0", "1"]
    assert [r.client for r in outcome.rejected] == ["2", "3"]
    assert after is pending.after
    assert run.state is before


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
