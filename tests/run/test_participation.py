"""Who takes part: rules, drop-out, stragglers; all seeded."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import fedloom as fl
from fedloom.rounds.sampling import Participation, Roster, draw, read_trace
from tests.helpers import everything, federation, fit, identical, mlp

ROWS = {str(i): 10 * (i + 1) for i in range(10)}
ROSTER = Roster.of(ROWS)


def drawn(round: int, size: int = 3, seed: int = 0, **options: Any) -> Any:
    return draw(Participation(**options), (), seed, round, ROSTER, size, everyone=False)


def test_cyclic_takes_everybody_in_turn() -> None:
    seen = [drawn(r, rule="cyclic").ids for r in range(1, 11)]
    assert seen[0] == ("0", "1", "2")
    assert seen[3] == ("0", "1", "9"), "in federation order, whatever the turn"
    assert Counter(i for ids in seen for i in ids) == dict.fromkeys(ROWS, 3)


def test_size_prefers_large_clients() -> None:
    counts = Counter(i for r in range(1, 2001) for i in drawn(r, 1, rule="size").ids)
    for name, rows in ROWS.items():
        assert counts[name] / 2000 == pytest.approx(rows / sum(ROWS.values()), abs=0.03)


def test_dropout_and_stragglers_are_seeded_and_of_the_asked_frequency() -> None:
    options: dict[str, Any] = {"dropout": 0.3, "stragglers": 0.5, "min_work": 0.2}
    rounds = [drawn(r, 10, **options) for r in range(1, 501)]
    assert rounds == [drawn(r, 10, **options) for r in range(1, 501)]
    assert rounds != [drawn(r, 10, seed=1, **options) for r in range(1, 501)]
    assert sum(len(d.dropped) for d in rounds) / 5000 == pytest.approx(0.3, abs=0.03)
    shares = [s for d in rounds for s in d.shares.values()]
    assert len(shares) / 5000 == pytest.approx(0.7 * 0.5, abs=0.03)
    assert 0.2 <= min(shares) < 0.25
    assert 0.95 < max(shares) <= 1.0
    assert not any(set(d.dropped) & set(d.shares) for d in rounds)


def test_a_client_that_drops_out_keeps_its_old_state_and_sends_nothing() -> None:
    result = fit("fedper", participation={"dropout": 0.5}, rounds=1, data=federation((9, 8, 7, 9, 8)))
    record = result.history[0]
    assert 0 < len(record["dropped"]) < 5
    assert result.run is not None
    assert set(result.run.clients) == set(record["clients"]) - set(record["dropped"])
    body = 8 * (6 * 5 + 5)
    assert record["bytes_up"] == body * (5 - len(record["dropped"]))
    assert record["bytes_down"] == body * 5, "it was sent the model"


def test_a_round_in_which_everybody_drops_out_changes_nothing() -> None:
    seed = next(
        s
        for s in range(200)
        if len(draw(Participation(dropout=0.9), (), s, 1, ROSTER, 10, everyone=False).dropped) == 10
    )
    data = federation((5,) * 10)
    result = fit("fedavg", data=data, participation={"dropout": 0.9}, rounds=1, seed=seed)
    assert len(result.history[0]["dropped"]) == 10
    assert result.run is not None
    assert identical(result.run.bound.start, result.run.state.leaves)
    assert result.history[0]["train_loss"] is None


def test_stragglers_make_part_of_their_steps() -> None:
    data = federation((40, 40, 40))
    options: dict[str, Any] = {"data": data, "rounds": 1, "epochs": 2, "batch_size": 4}
    result = fit("fedavg", participation={"stragglers": 1.0, "min_work": 0.1}, **options)
    assert result.run is not None
    shares = result.run.drawn(1).shares
    assert len(shares) == 3
    import math

    from fedloom.engines import LoopEngine
    from fedloom.rounds.server import dispatch

    run = result.run
    run.state = type(run.state)(run.bound.start, run.bound.server_memory)
    _, sent = dispatch(run.bound, run.state, run.cohort(list(run.sites), 1))
    people = [run.participant(i, sent, shares[i]) for i in run.sites]
    replies = LoopEngine().run_cohort(run.bound, run.work, run.bound.method.schedule.round, sent.post, people)
    assert [r.steps["main"] for r in replies] == [math.ceil(shares[i] * 20) for i in run.sites]


def test_nothing_asked_changes_nothing() -> None:
    plain = everything(fit("scaffold", cohort=2))
    same = everything(fit("scaffold", cohort=2, participation={"dropout": 0.0, "stragglers": 0.0}))
    assert identical(plain, same)


def test_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("round,client\n1,0\n1,2\n2,1\n")
    result = fl.fit(
        "fedavg",
        mlp(),
        federation(),
        rounds=4,
        cohort=1.0,
        participation={"rule": "trace", "trace": str(path)},
        progress=False,
    )
    assert [r["clients"] for r in result.history] == [["0", "2"], ["1"], ["0", "2"], ["1"]]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a,b\n1,0\n", "columns round and client"),
        ("round,client\n0,0\n", "line 2: round '0'"),
        ("round,client\nx,0\n", "round 'x'"),
        ("round,client\n1,7\n", "unknown client '7'"),
        ("round,client\n1,0\n3,0\n", "nobody is available in round 2"),
        ("round,client\n", "names no client"),
    ],
)
def test_bad_traces(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(fl.UserError, match=said):
        read_trace(path, ["0", "1", "2"])
    with pytest.raises(fl.UserError, match="cannot read"):
        read_trace(tmp_path / "nothing.csv", ["0"])
