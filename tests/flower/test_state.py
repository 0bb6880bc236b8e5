"""A site's folder: two versions, replaced whole, found by the round that the server names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr")

from fedloom.clients.states import ClientState
from fedloom.flower.error_codes import Code, Refusal
from fedloom.flower.site.site_store import SiteStore, folder_name
from fedloom.store.codec import pack, state_tree


def state(value: float, rounds: int = 1) -> ClientState:
    return ClientState({"a/ü.weight": torch.tensor([value])}, {"owner": {"k": torch.tensor(value)}}, rounds)


def test_two_versions_are_kept(tmp_path: Path) -> None:
    store = SiteStore(tmp_path)
    base = None
    for round in range(1, 6):
        store.save("trial", "fedavg", round, state(round, round), base)
        base = round
    assert store.rounds("trial", "fedavg") == [4, 5]
    back = store.load("trial", "fedavg", 4)
    assert (float(back.leaves["a/ü.weight"]), float(back.memory["owner"]["k"]), back.rounds) == (4.0, 4.0, 4)


def test_a_lost_round_changes_nothing(tmp_path: Path) -> None:
    store = SiteStore(tmp_path)
    store.save("trial", "fedavg", 1, state(1), None)
    store.save("trial", "fedavg", 2, state(2), 1)
    store.save("trial", "fedavg", 3, state(3), 1)
    assert store.rounds("trial", "fedavg") == [1, 3]
    assert float(store.load("trial", "fedavg", 1).leaves["a/ü.weight"]) == 1.0


def test_runs_and_experiments_do_not_meet(tmp_path: Path) -> None:
    store = SiteStore(tmp_path)
    for experiment, run in (("a", "x"), ("a", "y"), ("b", "x"), ("a", "../y")):
        store.save(experiment, run, 1, state(1), None)
    assert len(list(tmp_path.rglob("round-*"))) == 4
    assert all(tmp_path in path.resolve().parents for path in tmp_path.rglob("round-*"))


def test_long_names_stay_apart() -> None:
    a, b = (folder_name("fedavg + " + "clip(1.0) + " * 40 + end) for end in ("a", "b"))
    assert a != b
    assert len(a) < 120


@pytest.mark.parametrize("content", [None, b"", b"\x80\x04K\x01.", b"\x08" + bytes(7) + b"{}      "])
def test_missing_and_damaged_files_are_refused_with_a_code(tmp_path: Path, content: bytes | None) -> None:
    store = SiteStore(tmp_path)
    store.save("trial", "fedavg", 1, state(1), None)
    path = next(tmp_path.rglob("round-*"))
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(Refusal) as refusal:
        store.load("trial", "fedavg", 1)
    assert refusal.value.code == Code.STATE


@pytest.mark.parametrize("number", [{"format": 2}, {}])
def test_state_of_another_format_is_refused_in_one_line(tmp_path: Path, number: dict[str, int]) -> None:
    store = SiteStore(tmp_path)
    store.save("trial", "fedavg", 1, state(1), None)
    next(tmp_path.rglob("round-*")).write_bytes(pack({**number, **state_tree(state(1))}, torch.device("cpu")))
    with pytest.raises(Refusal) as refusal:
        store.load("trial", "fedavg", 1)
    assert refusal.value.code == Code.STATE
    assert f"it has format {number.get('format')}; expected format 1" in refusal.value.reason
    assert "\n" not in refusal.value.reason
