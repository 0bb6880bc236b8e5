"""Large populations: what clients keep spills to disk and comes back as it was; a round costs what takes part."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedloom as fl
from fedloom.clients.states import ClientState
from fedloom.errors import RunError, UserError
from fedloom.spec.optimizer import OptState
from fedloom.store import client_store as store
from fedloom.store.client_store import ClientStore
from tests.helpers import bn_mlp, federation
from tests.run.test_resume import contents, interrupted

ROOT = Path(__file__).parent.parent.parent


def state(value: float, rounds: int = 1) -> ClientState:
    """Some states have a memory, some an optimiser, and leaves of all types that occur."""
    leaves = {
        "w": torch.full((4, 3, 2, 2), value).to(memory_format=torch.channels_last),
        "half": torch.tensor(value, dtype=torch.bfloat16),
        "count": torch.tensor([int(value)]),
        "none": torch.zeros(0, 3),
    }
    memory = {"owner": {"k": torch.tensor(value, dtype=torch.float64)}} if int(value) % 2 else {}
    kept = {"main": [OptState(step=int(value) % 3)]} if int(value) % 5 == 0 else {}
    return ClientState(leaves, memory, rounds, kept)


def same(a: ClientState, b: ClientState) -> bool:
    return (
        a.rounds == b.rounds
        and list(a.leaves) == list(b.leaves)
        and all(torch.equal(v, b.leaves[k]) and v.dtype == b.leaves[k].dtype for k, v in a.leaves.items())
        and all(v.stride() == b.leaves[k].stride() for k, v in a.leaves.items())
        and a.memory == b.memory
        and a.optimizer == b.optimizer
    )


@pytest.mark.parametrize("own", [True, False], ids=["temporary", "folder"])
def test_the_store_is_a_dictionary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: bool) -> None:
    """Random writes, readings, deletions, marks and returns, with room for a few states only, against a plain dictionary."""
    monkeypatch.setattr(store, "SEGMENT", 30_000)
    monkeypatch.setattr(store, "SMALL", 4)
    kept = ClientStore(None if own else tmp_path / "kept", limit=60_000)
    draw, plain, marked = random.Random(3), dict[str, ClientState](), dict[str, ClientState]()
    for step in range(1500):
        name, what = str(draw.randrange(60)), draw.random()
        if what < 0.5:
            kept[name] = plain[name] = state(float(step), draw.randrange(9))
        elif what < 0.9 and name in plain:
            assert same(kept[name], plain[name])
            assert kept.rounds(name) == plain[name].rounds
        elif what < 0.92 and name in plain:
            del kept[name], plain[name]
        elif what < 0.97:
            kept.mark()
            marked = dict(plain)
        elif what < 0.98:
            kept.back()
            plain = dict(marked)
    assert set(kept) == set(plain)
    assert all(same(kept[name], value) for name, value in plain.items())
    assert list(kept.place().glob("clients-*")), "it never spilled"
    kept.mark()
    files = kept.flush()
    kept.clean(files)
    assert len(list(kept.place().glob("clients-*"))) == len(files)
    again = ClientStore(kept.place())
    again.open(files, kept.gone)
    assert set(again) == set(plain)
    assert all(same(again[name], value) for name, value in plain.items())


def test_a_run_that_spills_is_the_run_that_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {
        "method": "ditto",
        "model": bn_mlp(),
        "data": federation(),
        "rounds": 6,
        "cohort": 2,
        "batch_size": 4,
    }
    fl.fit(**options, out=tmp_path / "whole", progress=False)
    monkeypatch.setattr(store, "LIMIT", 3_000)
    interrupted(tmp_path / "cut", 4, **options)
    fl.fit(**options, out=tmp_path / "cut", resume=True, progress=False)
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")
    loose = fl.fit(**options, progress=False)
    assert [p.name for p in loose.run.clients.place().glob("clients-*")], "it never spilled"


def test_a_failed_round_leaves_the_state_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint after an error is that of the last good round, whatever clients had sent by then."""
    from fedloom.rounds.run import Run

    worked = Run._run_server_program

    def fail(self: Run, bound: Any, round: int) -> None:
        worked(self, bound, round)
        if round == 3:
            raise RunError("enough")

    options: dict[str, Any] = {"method": "fedper", "model": bn_mlp(), "data": federation(), "rounds": 4, "cohort": 2}
    fl.fit(**options, out=tmp_path / "whole", progress=False)
    with monkeypatch.context() as patch:
        patch.setattr(Run, "_run_server_program", fail)
        with pytest.raises(RunError, match="enough"):
            fl.fit(**options, out=tmp_path / "cut", progress=False)
    fl.fit(**options, out=tmp_path / "cut", resume=True, progress=False)
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


def population(clients: int, rows: int = 6) -> fl.Federation:
    draw = np.random.default_rng(0)
    x = draw.standard_normal((clients * rows, 4), dtype=np.float32)
    split = np.tile(np.array(["train"] * (rows - 2) + ["test"] * 2), clients)
    return fl.Federation.from_rows((x, x[:, :3].argmax(1)), np.repeat(np.arange(clients), rows), split=split)


@pytest.mark.filterwarnings("ignore:clients that never took part")
def test_two_thousand_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A round and its checkpoint touch the cohort, not the population."""
    from fedloom.runs import problem

    made: list[str] = []
    whole = problem.make_site
    monkeypatch.setattr(problem, "make_site", lambda c, *args: (made.append(c.id), whole(c, *args))[1])
    sizes: list[int] = []

    def look(record: dict[str, Any]) -> bool:
        sizes.append(len(set(made)))
        return False

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    options: dict[str, Any] = {"method": "fedper", "model": model, "data": population(2000), "rounds": 5, "cohort": 20}
    result = fl.fit(**options, evaluate={"every": 0}, out=tmp_path / "run", callbacks=[look], progress=False)
    assert sizes[3] <= 4 * 20 + 2, "sites were made of clients that took no part"
    assert len(result.clients) == 2000
    assert sum(c.rounds for c in result.clients.values()) == 5 * 20
    written = sorted((tmp_path / "run" / "checkpoint").glob("clients-*"))
    assert sum(p.stat().st_size for p in written) < 100 * 2000, "more than the participants was written"
    names = [json.loads(line)["clients"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    seen = next(n for n in names[0])
    loaded = fl.load_run(tmp_path / "run", model=model)
    for client in (seen, "1999"):
        found, there = loaded.model(client).state_dict(), result.model(client).state_dict()
        assert all(torch.equal(found[k], there[k]) for k in there)


def test_from_rows() -> None:
    x, y = np.arange(12, dtype=np.float32).reshape(12, 1), np.zeros(12, int)
    owner = np.array(["b", "a"] * 6)
    data = fl.Federation.from_rows((x, y), owner, test=0.5, seed=1)
    for name, first in (("a", 1), ("b", 0)):
        rows = torch.cat([data[name].train.x, data[name].test.x]).flatten().tolist()
        assert sorted(rows) == list(range(first, 12, 2))
        assert len(data[name].test) == 3
    with pytest.raises(UserError, match="whose each of the 12 rows is"):
        fl.Federation.from_rows((x, y), owner[:5])
    with pytest.raises(UserError, match="train, val, test"):
        fl.Federation.from_rows((x, y), owner, split=["train"] * 11 + ["tset"])
    with pytest.raises(UserError, match="'b' has no training rows"):
        fl.Federation.from_rows((x, y), owner, split=np.where(owner == "b", "test", "train"))


@pytest.mark.slow
def test_a_hundred_thousand_clients() -> None:
    """Host memory below 4 GiB, start-up below 10 s of processor time, rounds as long as with a hundred clients."""
    found = []
    for clients in (100, 100_000):
        words = [sys.executable, str(ROOT / "benchmarks" / "scale.py"), "--one", str(clients), "--rounds", "30"]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        found.append(json.loads(done.stdout.splitlines()[-1]))
    few, many = found
    assert many["peak"] < 4096
    assert many["start_processor"] < 10
    assert many["round_quartile"] < 1.1 * few["round_quartile"] + 0.002
