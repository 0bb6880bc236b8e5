"""Splits: counts, strata, and the three ways to use an official test set."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.data import Dataset, Rows, affine, dirichlet, iid, load, natural, quantity
from fedloom.data.split import cut, matched, three_way
from fedloom.errors import UserError
from fedloom.rng import stream


def made(train: int = 600, test: int | None = 200, classes: int = 5, groups: int = 0) -> Dataset:
    draw = stream(3, "init")

    def rows(n: int, first: int) -> Rows:
        return Rows(torch.arange(first, first + n).float().unsqueeze(1), torch.from_numpy(draw.integers(0, classes, n)))

    named = {}
    if groups:
        named = {"groups": tuple(f"g{i}" for i in range(groups)), "train_groups": draw.integers(0, groups, train)}
        if test is not None:
            named["test_groups"] = draw.integers(0, groups, test)
    return Dataset("made", rows(train, 0), None if test is None else rows(test, train), **named)


def numbers(rows: Rows | None) -> list[int]:
    return [] if rows is None else rows.x[:, 0].long().tolist()


@settings(max_examples=200, deadline=None)
@given(labels=st.lists(st.integers(0, 5), max_size=120), share=st.floats(0, 0.999))
def test_cut_takes_the_share_and_is_stratified(labels, share):
    labels = np.array(labels, np.int64)
    kept, off = cut(labels, share, stream(0, "split"))
    n = len(labels)
    assert sorted([*kept.tolist(), *off.tolist()]) == list(range(n))
    if share == 0 or n < 2:
        assert len(off) == 0
        return
    assert len(off) == min(max(int(share * n + 0.5), 1), n - 1)
    for c in np.unique(labels):
        size = int((labels == c).sum())
        if size > 1:
            assert abs((labels[off] == c).sum() - len(off) * size / n) <= 1


def test_cut_at_a_quarter_is_exact_where_it_can_be():
    labels = np.repeat(np.arange(4), [4, 8, 40, 100])
    _, off = cut(labels, 0.25, stream(0, "split"))
    assert np.bincount(labels[off]).tolist() == [1, 2, 10, 25]


def test_val_is_a_share_of_the_training_rows():
    labels = np.zeros(100, np.int64)
    assert [len(part) for part in three_way(labels, 0.2, 0.25, stream(0, "split"))] == [60, 20, 20]


def test_matched_deals_every_test_row_once_in_training_proportions():
    draw = stream(1, "init")
    train = [draw.integers(0, 3, n) for n in (100, 300, 50)] + [np.full(40, 3)]
    test = draw.integers(0, 5, 400)
    dealt = matched(train, test, stream(0, "split"))
    assert sorted(np.concatenate(dealt).tolist()) == list(range(400))
    for c in range(4):
        weights = np.array([(labels == c).sum() for labels in train])
        got = np.array([(test[index] == c).sum() for index in dealt])
        assert np.abs(got - (test == c).sum() * weights / weights.sum()).max() < 1
    orphans = np.array([(test[index] == 4).sum() for index in dealt])
    sizes = np.array([len(labels) for labels in train])
    assert np.abs(orphans - (test == 4).sum() * sizes / sizes.sum()).max() < 1


def test_per_client_pools_official_test_rows():
    data = made().partition(dirichlet(0.3), clients=7, split="per_client", val=0.1)
    every = [n for c in data for rows in (c.train, c.test, c.val) for n in numbers(rows)]
    assert sorted(every) == list(range(800))
    assert all(abs(len(c.test) - 0.25 * sum(len(r) for r in c.parts().values())) <= 0.5 for c in data)


def test_matched_is_the_default_with_an_official_test_set():
    data = made().partition(dirichlet(0.3), clients=7)
    assert data.origin["split"] == "matched"
    assert sorted(n for c in data for n in numbers(c.train)) == list(range(600))
    assert sorted(n for c in data for n in numbers(c.test)) == list(range(600, 800))


def test_shared_gives_everyone_the_same_test_rows():
    source = made()
    data = source.partition(iid(), clients=3, split="shared")
    assert all(c.test is source.test for c in data)


def test_clients_without_test_rows_have_none():
    data = made(train=50, test=3).partition(iid(), clients=5)
    assert sum(c.test is None for c in data) >= 2
    assert sum(len(c.test) for c in data if c.test is not None) == 3


def test_natural_clients_keep_their_own_official_test_rows():
    source = made(groups=4)
    data = source.partition()
    assert data.ids == ("g0", "g1", "g2", "g3")
    for k, client in enumerate(data):
        assert numbers(client.train) == np.flatnonzero(source.train_groups == k).tolist()
        assert numbers(client.test) == (600 + np.flatnonzero(source.test_groups == k)).tolist()


def test_natural_clients_are_pooled_per_client():
    data = made(groups=4).partition(natural(), split="per_client", test=0.5)
    assert sorted(n for c in data for n in numbers(c.train) + numbers(c.test)) == list(range(800))


def test_seed_and_split_are_independent_of_other_clients():
    source = made(groups=4, test=None)
    every, two = source.partition(natural()), source.partition(natural(), clients=2, seed=0)
    for client in two:
        assert numbers(client.test) == numbers(every[client.id].test)


@pytest.mark.parametrize("rule", [iid(), dirichlet(0.5), quantity(0.5)])
def test_same_seed_same_federation(rule):
    source = load("digits")
    one, same, other = (source.partition(rule, clients=5, seed=s, val=0.2) for s in (4, 4, 5))
    for a, b in zip(one, same, strict=True):
        assert all(torch.equal(a.parts()[p].x, b.parts()[p].x) for p in ("train", "val", "test"))
    assert any(
        a.train.x.shape != b.train.x.shape or (a.train.x != b.train.x).any() for a, b in zip(one, other, strict=True)
    )


def test_affine_is_one_map_per_client_for_all_parts():
    source = Dataset("made", Rows(torch.randn(400, 3, 4, 4), torch.zeros(400, dtype=torch.long)))
    plain, skewed = (source.partition(rule, clients=4, val=0.1) for rule in (iid(), affine(0.5, 2.0)))
    maps = []
    for a, b in zip(plain, skewed, strict=True):
        fits = []
        for part in ("train", "val", "test"):
            x, y = a.parts()[part].x, b.parts()[part].x
            for c in range(3):
                gain, offset = np.polyfit(x[:, c].flatten().numpy(), y[:, c].flatten().numpy(), 1)
                assert np.allclose(gain * x[:, c].numpy() + offset, y[:, c].numpy(), atol=1e-4)
                fits.append((gain, offset))
        assert np.allclose(np.reshape(fits, (3, 3, 2)), np.reshape(fits, (3, 3, 2))[:1], atol=1e-4)
        maps.append(fits[0])
    assert np.std(maps, axis=0).min() > 0.05


def test_affine_of_bytes_scales_as_the_step_would():
    from fedloom.data import Scale, to_float

    pictures = torch.randint(0, 256, (100, 1, 2, 2), dtype=torch.uint8)
    source = Dataset("made", Rows(pictures, torch.zeros(100, dtype=torch.long)), scale=Scale((0.5,), (0.25,)))
    data = source.partition(affine(0.0, 0.0), clients=2)
    plain = source.partition(iid(), clients=2)
    assert data.scale is None
    assert torch.allclose(data[0].train.x, to_float(plain[0].train.x, plain.scale))


def test_regression_labels_cannot_be_dealt_by_class():
    source = Dataset("made", Rows(torch.randn(100, 2), torch.randn(100)))
    assert len(source.partition(iid(), clients=4)) == 4
    with pytest.raises(UserError, match="by class"):
        source.partition(dirichlet(0.3), clients=4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"split": "half"}, "matched"),
        ({"split": "shared"}, "official test set"),
        ({"test": 1.0}, "below 1"),
        ({"val": -0.1}, "at least 0"),
        ({"test": "a"}, "share"),
        ({"clients": 0}, "at least 1"),
        ({"clients": 2.5}, "whole number"),
        ({"clients": 2000}, "fewer clients"),
        ({"partitioner": "dirichlet"}, "dirichlet"),
        ({"partitioner": natural()}, "natural clients"),
    ],
)
def test_wrong_arguments_are_explained(options, words):
    with pytest.raises(UserError, match=words):
        load("digits").partition(**options)
