"""Partitioners: every row exactly once, enough rows each, always an end."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.data import PARTITIONS, Partitioner, affine, classes_per_client, dirichlet, iid, natural, quantity, shards
from fedloom.data.partition import apportion, largest_remainder, simplex
from fedloom.errors import UserError
from fedloom.rng import stream

labels_of = st.lists(st.integers(0, 6), min_size=1, max_size=300).map(lambda values: np.array(values, np.int64))
alphas = st.one_of(st.floats(1e-9, 1e-3), st.floats(1e-3, 10), st.floats(10, 1e12), st.just(float("inf")))


def deal(rule: Partitioner, labels: np.ndarray, clients: int, seed: int = 0) -> list[np.ndarray]:
    return rule(labels, clients, stream(seed, "partition"))


def assert_every_row_once(parts: list[np.ndarray], rows: int) -> None:
    assert sorted(np.concatenate(parts).tolist()) == list(range(rows))
    assert all((np.diff(part) > 0).all() for part in parts)


@settings(max_examples=150, deadline=None)
@given(labels=labels_of, clients=st.integers(1, 40), alpha=alphas, least=st.integers(0, 12), balanced=st.booleans())
def test_dirichlet_deals_every_row_once_and_enough_to_each(labels, clients, alpha, least, balanced):
    rule = dirichlet(alpha, min_size=least, balanced=balanced)
    if clients * max(least, 1) > len(labels):
        with pytest.raises(UserError, match="fewer clients"):
            deal(rule, labels, clients)
        return
    parts = deal(rule, labels, clients)
    assert len(parts) == clients
    assert_every_row_once(parts, len(labels))
    sizes = [len(part) for part in parts]
    assert min(sizes) >= max(least, 1)
    if balanced:
        assert max(sizes) - min(sizes) <= 1


@settings(max_examples=60, deadline=None)
@given(labels=labels_of, clients=st.integers(1, 40), per_client=st.integers(1, 5))
def test_shards_and_iid_deal_every_row_once(labels, clients, per_client):
    for rule, least in ((iid(), 1), (shards(per_client), per_client)):
        if clients * least > len(labels):
            with pytest.raises(UserError):
                deal(rule, labels, clients)
        else:
            parts = deal(rule, labels, clients)
            assert_every_row_once(parts, len(labels))
            assert max(map(len, parts)) - min(map(len, parts)) <= per_client


@settings(max_examples=60, deadline=None)
@given(labels=labels_of, clients=st.integers(1, 40), spread=st.floats(0, 50), alpha=alphas, least=st.integers(0, 5))
def test_quantity_deals_every_row_once_and_enough_to_each(labels, clients, spread, alpha, least):
    for rule in (quantity(alpha=alpha, min_size=least), quantity(sigma=spread, min_size=least)):
        if clients * max(least, 1) > len(labels):
            with pytest.raises(UserError):
                deal(rule, labels, clients)
        else:
            parts = deal(rule, labels, clients)
            assert_every_row_once(parts, len(labels))
            assert min(map(len, parts)) >= max(least, 1)


@settings(max_examples=100, deadline=None)
@given(labels=labels_of, clients=st.integers(1, 40), n=st.integers(1, 8))
def test_classes_per_client_deals_every_row_once_or_says_why_not(labels, clients, n):
    try:
        parts = deal(classes_per_client(n), labels, clients)
    except UserError:
        classes, counts = np.unique(labels, return_counts=True)
        holders = -(-clients * n // len(classes))
        assert clients > len(labels) or n > len(classes) or clients * n < len(classes) or counts.min() < holders
        return
    assert_every_row_once(parts, len(labels))
    assert all(1 <= len(np.unique(labels[part])) <= n for part in parts)


def test_classes_per_client_gives_exactly_n_classes_where_there_are_rows():
    labels = np.repeat(np.arange(10), 100)
    parts = deal(classes_per_client(2), labels, 50)
    assert {len(np.unique(labels[part])) for part in parts} == {2}
    assert {len(part) for part in parts} == {20}


@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize("alpha", [1e-9, 0.01, 0.3])
def test_dirichlet_ends_at_extremes(alpha, balanced):
    labels = stream(0, "init").integers(0, 10, 50_000)
    parts = deal(dirichlet(alpha, balanced=balanced), labels, 500)
    assert_every_row_once(parts, len(labels))
    assert min(map(len, parts)) >= 10
    tight = deal(dirichlet(alpha, min_size=100, balanced=balanced), labels, 500)
    assert {len(part) for part in tight} == {100}


def test_one_row_each_for_as_many_clients_as_rows():
    labels = np.zeros(400, np.int64)
    assert_every_row_once(deal(dirichlet(0.01, min_size=1), labels, 400), 400)


def test_rows_move_from_the_largest_only_and_only_as_many_as_are_needed():
    labels = np.zeros(100, np.int64)
    free = [len(part) for part in deal(dirichlet(0.05, min_size=1), labels, 5)]
    moved = [len(part) for part in deal(dirichlet(0.05, min_size=10), labels, 5)]
    assert min(free) < 10
    assert [n for n, m in zip(free, moved, strict=True) if n < 10 and m != 10] == []
    assert moved.index(max(moved)) == free.index(max(free))


def test_alpha_is_the_skew():
    labels = np.repeat(np.arange(10), 500)

    def entropy(alpha: float, balanced: bool) -> float:
        parts = deal(dirichlet(alpha, balanced=balanced), labels, 20)
        shares = np.stack([np.bincount(labels[part], minlength=10) / len(part) for part in parts])
        return float(-(shares * np.log(np.maximum(shares, 1e-12))).sum(1).mean())

    for balanced in (False, True):
        values = [entropy(alpha, balanced) for alpha in (0.02, 0.3, 3.0, 1e6)]
        assert values == sorted(values)
        assert values[0] < 0.8
        assert values[-1] > 0.99 * np.log(10)


def test_dirichlet_proportions_have_the_right_moments():
    """Share of a class at a client: mean 1/K, variance (1/K)(1 - 1/K)/(K alpha + 1)."""
    for alpha in (0.05, 0.5, 5.0):
        draws = np.stack([simplex(alpha, 4, stream(s, "partition")) for s in range(4000)])
        assert np.allclose(draws.sum(1), 1)
        variance = 0.25 * 0.75 / (4 * alpha + 1)
        assert np.abs(draws.mean(0) - 0.25).max() < 5 * np.sqrt(variance / 4000)
        assert np.abs(draws.var(0) / variance - 1).max() < 0.2


def test_clients_that_share_rows_have_no_row_twice():
    labels = np.repeat(np.arange(10), 60)
    parts = deal(dirichlet(0.1, replace=True), labels, 30)
    assert all(len(np.unique(part)) == len(part) >= 10 for part in parts)
    assert len(np.unique(np.concatenate(parts))) < sum(map(len, parts))


def test_natural_clients_are_all_groups_or_a_seeded_choice():
    groups = np.array([2, 0, 2, 1, 0, 3])
    assert [part.tolist() for part in deal(natural(), groups, 4)] == [[1, 4], [3], [0, 2], [5]]
    chosen = deal(natural(), groups, 2, seed=5)
    assert [part.tolist() for part in chosen] == [part.tolist() for part in deal(natural(), groups, 2, seed=5)]
    assert len({tuple(map(tuple, deal(natural(), groups, 2, seed=s))) for s in range(20)}) > 1
    with pytest.raises(UserError, match="4"):
        deal(natural(), groups, 5)


@pytest.mark.parametrize(
    "rule", [iid(), dirichlet(0.3), dirichlet(0.3, balanced=True), classes_per_client(2), shards(2), quantity(0.5)]
)
def test_deterministic_under_a_seed(rule):
    labels = np.repeat(np.arange(5), 100)
    first, again, other = (deal(rule, labels, 10, seed) for seed in (0, 0, 1))
    assert all((a == b).all() for a, b in zip(first, again, strict=True))
    assert any(len(a) != len(b) or (a != b).any() for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (iid(), "iid()"),
        (dirichlet(0.3), "dirichlet(alpha=0.3)"),
        (dirichlet(1, min_size=1, balanced=True), "dirichlet(alpha=1.0, min_size=1, balanced=True)"),
        (quantity(sigma=2), "quantity(sigma=2.0)"),
        (shards(), "shards()"),
        (natural() + affine(0.1, 0), "natural() + affine(scale=0.1, shift=0.0)"),
    ],
)
def test_text_form_makes_the_rule_again(rule, text):
    assert str(rule) == text
    assert eval(text, dict(PARTITIONS)) == rule


@pytest.mark.parametrize(
    "make",
    [
        lambda: dirichlet(0),
        lambda: dirichlet(-1.0),
        lambda: dirichlet(float("nan")),
        lambda: dirichlet("a"),
        lambda: dirichlet(True),
        lambda: dirichlet(0.3, min_size=1.5),
        lambda: dirichlet(0.3, balanced="no"),
        lambda: classes_per_client(0),
        lambda: shards(0),
        lambda: quantity(),
        lambda: quantity(alpha=1, sigma=1),
        lambda: quantity(sigma=float("inf")),
        lambda: affine(scale=-1),
        lambda: affine(shift=float("inf")),
        lambda: iid() + iid(),
        lambda: affine() + affine(),
    ],
)
def test_arguments_out_of_range_are_refused(make):
    with pytest.raises(UserError):
        make()


@pytest.mark.parametrize("clients", [0, -1, 2.0, True, "3"])
def test_number_of_clients_is_checked(clients):
    with pytest.raises(UserError, match="clients"):
        deal(iid(), np.zeros(10, np.int64), clients)


@settings(max_examples=100, deadline=None)
@given(total=st.integers(0, 10_000), weights=st.lists(st.floats(0, 1), min_size=1, max_size=50))
def test_whole_numbers_add_up(total, weights):
    shares = np.array(weights)
    if shares.sum() == 0:
        shares = shares + 1
    quota = total * shares / shares.sum()
    for counts, slack in (
        (apportion(total, shares), 1.001),
        (largest_remainder(total, shares, stream(0, "split")), 1.0),
    ):
        assert counts.sum() == total
        assert (counts >= 0).all()
        assert np.abs(counts - quota).max() <= slack
