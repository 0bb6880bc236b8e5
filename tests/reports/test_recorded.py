"""What a run's folder holds for a report: curves of clients, the data in outline, the parts of the loss."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA

import fedloom as fl
from fedloom.clients.runner import ClientRunner
from fedloom.rounds import diagnostics, server
from fedloom.runs.run_folder import read_curves
from fedloom.spec.parts import Receive
from fedloom.tasks.batch import Batch
from tests.helpers import federation, mlp
from tests.reports.conftest import MODEL, OPTIONS


def test_curves_are_the_clients_of_each_evaluation(tmp_path: Path) -> None:
    data = federation((9, 12, 6))
    result = fl.fit("fedper", MODEL, data, out=tmp_path, **{**OPTIONS, "rounds": 5}, evaluate={"every": 2})
    curves = read_curves(tmp_path)
    assert [line["round"] for line in curves] == [2, 4, 5]
    for line in curves:
        mean = result.history[line["round"] - 1]["accuracy"]
        assert np.mean(list(line["clients"].values())) == pytest.approx(mean, abs=1e-6)
    assert curves[-1]["clients"] == pytest.approx(
        {n: c.metrics["accuracy"] for n, c in result.clients.items()}, abs=1e-6
    )


def test_curves_of_a_resumed_run_are_those_of_a_whole_one(tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def stop(record: dict[str, object]) -> None:
        if record["round"] == 3:
            raise Stop

    data, options = federation((9, 12, 6)), {**OPTIONS, "rounds": 4}
    fl.fit("fedavg", MODEL, data, out=tmp_path / "whole", **options)
    with pytest.raises(Stop):
        fl.fit("fedavg", MODEL, data, out=tmp_path / "cut", **options, callbacks=[stop])
    line = json.dumps({"round": 3, "clients": {"0": 0.0}})
    with open(tmp_path / "cut" / "curves.jsonl", "a") as file:  # a round whose checkpoint was never written
        file.write(line + '\n{"round"')
    (tmp_path / "cut" / "data.json").unlink()
    fl.fit("fedavg", MODEL, data, out=tmp_path / "cut", resume=True, **options)
    for name in ("curves.jsonl", "data.json"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_sketch_counts_and_projects() -> None:
    data = fl.data.load("digits").partition(fl.dirichlet(0.3), clients=7, seed=1)
    found = diagnostics.sketch(data)
    assert [c["counts"] for c in found["clients"]] == data.summary().counts.tolist()
    assert [[c["train"], c["test"]] for c in found["clients"]] == data.summary().rows[:, [0, 2]].tolist()
    points = found["points"]
    assert len(points["at"]) <= 500
    assert set(points["client"]) == set(range(7))
    # A table of few rows is projected whole, as an independent implementation does.
    table = federation((20, 30), shape=(6,))
    x = torch.cat([c.train.x for c in table]).double().numpy()  # type: ignore[misc]
    expected = PCA(6).fit((x - x.mean(0)) / x.std(0, ddof=1))
    mine = diagnostics.sketch(table)["points"]
    assert mine["explained"] == pytest.approx(expected.explained_variance_ratio_, rel=1e-3)
    theirs = expected.transform((x - x.mean(0)) / x.std(0, ddof=1))
    assert np.abs(mine["at"]) == pytest.approx(np.abs(theirs), rel=2e-3, abs=1e-3)


def test_sketch_of_awkward_data() -> None:
    draw = np.random.default_rng(0)
    masks = draw.integers(0, 3, (4, 8, 8))
    masks[:, 0] = 255
    dense = fl.Federation.from_arrays(
        [((draw.normal(size=(4, 3, 32, 32)).astype("float32"), masks), None)] * 2, ids=["a", "b"]
    )
    found = diagnostics.sketch(dense)
    assert found["dense"]
    assert sum(found["clients"][0]["counts"]) == 4 * 7 * 8
    assert found["points"]["label"] is None
    two = [({"a": np.zeros((3, 2), np.float32), "b": np.zeros((3, 2), np.float32)}, np.zeros(3, np.int64))]
    assert "points" not in diagnostics.sketch(fl.Federation.from_arrays([(two[0], None)]))
    numbers = fl.Federation.from_arrays([((np.ones((5, 2), np.float32), np.ones(5, np.float32)), None)])
    assert diagnostics.sketch(numbers)["classes"] == []
    many = federation([2] * 1500)
    assert len(diagnostics.sketch(many)["clients"]) == 1000
    assert len(diagnostics.sketch(many)["points"]["at"]) == 500


@pytest.mark.parametrize("method", ["fedprox(mu=0.3)", "fedavg + isr(points=1)", "fedproto", "ditto", "moon"])
def test_parts_of_the_loss_add_up_to_the_objective(method: str) -> None:
    run = fl.fit(method, mlp(), federation((9, 12)), **{**OPTIONS, "rounds": 2}, batch_size="full").run
    assert run is not None
    run.work = replace(run.work, batch_size="full")
    values = diagnostics.term_values(run)
    bound = run.at(run.state.round + 1)
    phase = next(iter(bound.phases.values()))
    if len(phase.terms) < 2:
        assert values == {}
        return
    ids = list(run.sites)
    _, sent = server.dispatch(bound, run.state, run.cohort(ids, run.state.round + 1))
    totals = []
    for name in ids:
        desk = ClientRunner(bound, run.work, sent.post, [run.participant(name, sent)])
        desk.run(tuple(s for s in bound.method.schedule.round[:1] if isinstance(s, Receive)))
        rows = desk.participants[0].site.train
        seen = desk.inputs.seen(desk.inputs.own)
        total, _ = desk.step(phase).value(desk.leaves, seen, Batch(rows.x, rows.y), {}, 0)
        totals.append(float(total))
    assert sum(values.values()) == pytest.approx(np.mean(totals), rel=1e-5)


def test_measuring_the_parts_of_the_loss_changes_nothing(tmp_path: Path) -> None:
    data = federation((9, 12, 6))
    with_folder = fl.fit("fedavg + isr(points=2) + lag(k=1)", MODEL, data, out=tmp_path, **OPTIONS)
    without = fl.fit("fedavg + isr(points=2) + lag(k=1)", MODEL, data, **OPTIONS)
    assert with_folder.history[-1]["terms"].keys() == {"task", "isr.1 body.act1", "isr.2 body.act2"}
    assert "terms" not in without.history[-1]
    for a, b in zip(with_folder.model("0").parameters(), without.model("0").parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_term_that_cannot_be_measured_is_named_once_and_does_not_end_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(run: object) -> dict[str, float]:
        raise KeyError("what")

    monkeypatch.setattr(diagnostics, "term_values", broken)
    result = fl.fit("fedprox(mu=0.1)", MODEL, federation((9, 12)), out=tmp_path, **OPTIONS)
    assert len(result.history) == 3
    assert not any("terms" in record for record in result.history)
    assert [record.get("unmeasured") for record in result.history] == [["terms: KeyError: 'what'"], None, None]
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])["unmeasured"]
