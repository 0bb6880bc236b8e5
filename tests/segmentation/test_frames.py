"""Neighbouring frames stay together: partitions, cuts and official test frames of recordings."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedloom as fl
from fedloom.data import Dataset, Rows, recordings


def film(lengths: list[int], test: list[int] | None = None, test_groups: list[int] | None = None) -> Dataset:
    """Recordings of these lengths; the first pixel of a picture tells which frame it is."""

    def rows(n: int, first: int) -> Rows:
        x = torch.arange(first, first + n).float()[:, None, None, None].expand(n, 1, 2, 2)
        return Rows(x, torch.zeros(n, 2, 2, dtype=torch.long))

    n = sum(lengths)
    groups = np.repeat(np.arange(len(lengths)), lengths)
    more = {} if test is None else {"test": rows(sum(test), n)}
    if test is not None and test_groups is not None:
        more |= {"test_groups": np.repeat(test_groups, test), "test_sequences": np.repeat(test_groups, test)}
    names = tuple("abcdefgh"[: max([len(lengths), *(g + 1 for g in test_groups or [])])])
    return Dataset("film", rows(n, 0), groups=names, train_groups=groups, sequences=groups, **more)


def numbers(rows: Rows | None) -> list[int]:
    return [] if rows is None else [int(v) for v in rows.x[:, 0, 0, 0]]


def contiguous(values: list[int]) -> bool:
    return values == list(range(values[0], values[0] + len(values)))


@pytest.mark.parametrize("rule", [fl.iid(), fl.quantity(sigma=0.5, min_size=1), fl.iid() + fl.affine()])
def test_random_rules_are_refused_with_the_reason(rule: object) -> None:
    with pytest.raises(fl.UserError, match=r"near-copies.*fl\.natural\(\).*fl\.chunks\(\)"):
        film([10, 12]).partition(rule, clients=2)


def test_forced_it_warns_and_says_so_in_the_origin() -> None:
    with pytest.warns(UserWarning, match="too good"):
        data = film([10, 12]).partition(fl.iid(), clients=2, part_frames=True)
    assert data.origin["part_frames"] is True
    assert not contiguous(numbers(data[0].train))


def test_natural_clients_are_the_recordings_and_the_end_is_for_testing() -> None:
    data = film([8, 12]).partition(test=0.25)
    assert data.ids == ("a", "b")
    assert numbers(data["a"].train) == [0, 1, 2, 3, 4, 5]
    assert numbers(data["a"].test) == [6, 7]
    assert numbers(data["b"].test) == [17, 18, 19]


def test_chunks_are_contiguous_and_longer_recordings_have_more() -> None:
    data = film([8, 24]).partition(fl.chunks(), clients=4, test=0.25)
    assert data.ids == ("a", "b-1", "b-2", "b-3")
    for client in data:
        assert contiguous(numbers(client.train) + numbers(client.test))
    assert [len(c.train) + len(c.test) for c in data] == [8, 8, 8, 8]


def test_chunks_refuse_fewer_clients_than_recordings() -> None:
    with pytest.raises(fl.UserError, match="2 recordings"):
        film([8, 24]).partition(fl.chunks(), clients=1)
    with pytest.raises(fl.UserError, match=r"a frame for each|need"):
        film([2, 2]).partition(fl.chunks(), clients=5)


def test_official_test_frames_go_to_their_recording_and_strange_ones_to_all() -> None:
    data = film([10, 30], test=[4, 8], test_groups=[0, 2]).partition()
    assert data.ids == ("a", "b")
    dealt = [numbers(c.test) for c in data]
    assert dealt[0][:4] == [40, 41, 42, 43]
    assert contiguous(dealt[0][4:])
    assert contiguous(dealt[1])
    assert sorted(dealt[0] + dealt[1]) == list(range(40, 52))
    assert len(dealt[1]) == 6


def test_pooled_recordings_make_a_client_of_their_own() -> None:
    data = film([10, 30], test=[4, 8], test_groups=[0, 2]).partition(split="per_client", test=0.5)
    assert data.ids == ("a", "b", "c")
    assert len(data["c"].train) == 4


@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=6),
    st.floats(0.05, 0.9),
    st.integers(0, 5),
)
def test_hold_out_parts_at_most_one_pair_of_neighbours(lengths: list[int], share: float, seed: int) -> None:
    sequences = np.repeat(np.arange(len(lengths)), lengths)
    kept, off = recordings.hold_out(sequences, share, np.random.default_rng(seed))
    n = len(sequences)
    assert sorted([*kept, *off]) == list(range(n))
    if n < 2:
        return
    assert len(kept) >= 1
    assert len(off) >= 1 or max(lengths) == 1
    side = np.isin(np.arange(n), off)
    parted = (side[1:] != side[:-1]) & (sequences[1:] == sequences[:-1])
    assert parted.sum() <= 1
    wanted = share * n
    assert abs(len(off) - wanted) <= max(max(lengths), wanted / 2) + 1


def test_street_scenes_hold_out_whole_sequences() -> None:
    data = fl.data.load("street_scenes", towns=3, frames=24, length=4, size=(16, 16))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        federation = data.partition(test=0.25)
    assert all(len(c.test) % 4 == 0 and len(c.test) for c in federation)
