"""What clients keep is stacked before the answer of the round before is there: with the same results, and only where it is what is asked for."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import fedloom as fl
from fedloom import server
from fedloom.engines.vectorised import VectorisedEngine, stacks
from fedloom.engines.vectorised.stacks import Stacks
from fedloom.store import clients, segments
from fedloom.work import ClientState, Participant
from tests.helpers import everything, federation, fit, gap, run_of

DATA = federation((24, 30, 24, 18, 24, 24))
OPTIONS: dict[str, Any] = {"cohort": 4, "epochs": 1, "batch_size": 12, "rounds": 6}
METHODS = ("scaffold", "fedaims", "fedavg + lag(k=1)", "ditto", "fedper", "feddyn", "fedmap")


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each stack that was asked for, whether it had been made."""
    plain, known = Stacks.of, list[bool]()

    def of(self: Stacks, values: Sequence[Tensor]) -> Tensor:
        known.append(tuple(map(id, values)) in self._ahead)
        made = plain(self, values)
        assert torch.equal(made, torch.stack(list(values)))
        return made

    monkeypatch.setattr(Stacks, "of", of)
    return known


def result(method: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = fl.models.mlp(6, 3, hidden=(8, 8, 8))
    return everything(fit(method, model, DATA, engine=VectorisedEngine(step="graphed"), **OPTIONS))


@pytest.mark.parametrize("method", METHODS)
def test_stacked_ahead_or_when_asked_for(method: str, found: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = result(method)
    used = sum(found)
    monkeypatch.setattr(Stacks, "foresee", lambda *args: None)
    found.clear()
    assert gap(ahead, result(method)) == 0
    assert not any(found)
    assert used > 0 or method == "fedmap", "whose clients keep nothing"


@pytest.mark.parametrize("method", ["scaffold", "fedper"])
def test_a_reply_that_is_rejected_leaves_the_client_as_it_was(
    method: str, found: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = VectorisedEngine.run_cohort

    def lossy(self: VectorisedEngine, bound: Any, work: Any, program: Any, post: Any, people: Any) -> Any:
        replies = plain(self, bound, work, program, post, people)
        if post.round in (2, 3):
            replies[0].fault = "lost"
        return replies

    monkeypatch.setattr(VectorisedEngine, "run_cohort", lossy)
    ahead = result(method)
    assert any(found)
    monkeypatch.setattr(Stacks, "foresee", lambda *args: None)
    assert gap(ahead, result(method)) == 0


def test_no_more_than_there_is_room_for(found: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "STACKED_BYTES", 100)
    result("scaffold")
    assert found
    assert not any(found)


def test_what_clients_keep_is_given_up_though_their_steps_are_planned() -> None:
    run = run_of(fit("fedavg", data=DATA, engine=VectorisedEngine(step="graphed"), **OPTIONS))
    ids = list(run.sites)
    post = server.plain_dispatch(run.bound, run.state, run.cohort(ids, 7)).post
    states = [ClientState(memory={"before": {"value": torch.zeros(3)}}) for _ in ids]
    held = [weakref.ref(state.memory["before"]["value"]) for state in states]
    box = [[Participant(run.sites[name], state) for name, state in zip(ids, states, strict=True)]]
    del states
    assert isinstance(run.engine, VectorisedEngine)
    run.engine.foresee(run.bound, run.work, 7, box.pop, post)
    assert run.engine.pools._ahead is not None
    assert not any(ref() is not None for ref in held)


@pytest.mark.parametrize("limit", [1, 20_000])
def test_nothing_is_read_from_disk_ahead(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It might have to make room again before the round begins."""
    plain, reads = segments.Segment.read, list[int]()

    def read(self: segments.Segment, *args: Any) -> ClientState:
        reads.append(1)
        return plain(self, *args)

    monkeypatch.setattr(segments.Segment, "read", read)
    monkeypatch.setattr(clients, "LIMIT", limit)
    data, counted = federation((24,) * 12), list[int]()
    for _ in range(2):
        reads.clear()
        fit("ditto", data=data, engine=VectorisedEngine(step="graphed"), evaluate={"every": 0}, **OPTIONS)
        counted.append(len(reads))
        monkeypatch.setattr(VectorisedEngine, "foresee", lambda *args: None)
    assert 0 < counted[0] <= counted[1]
