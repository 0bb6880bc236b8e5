"""The statistics against scipy, enumeration and hand-checked cases."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fedloom.comparison.statistics import front, holm, interval, paired_t, ranks, sign_test, wilcoxon

NUMBERS = st.lists(st.floats(-10, 10).map(lambda v: round(v, 6)), min_size=2, max_size=40)


@given(NUMBERS)
def test_interval_is_students(values: list[float]) -> None:
    found = interval(values)
    assert found is not None
    assert found.mean == pytest.approx(np.mean(values), abs=1e-12)
    if np.std(values) > 1e-9:
        low, high = stats.t.interval(0.95, len(values) - 1, np.mean(values), stats.sem(values))
        assert found.half == pytest.approx((high - low) / 2, rel=1e-6)


def test_interval_of_little() -> None:
    assert interval([]) is None
    found = interval([3.0])
    assert found is not None
    assert (found.mean, found.half, found.std, found.n) == (3.0, None, None, 1)


@given(NUMBERS)
def test_paired_t_is_scipys(values: list[float]) -> None:
    if np.std(values) > 1e-9:
        assert paired_t(values) == pytest.approx(stats.ttest_1samp(values, 0).pvalue, rel=1e-9, abs=1e-300)


@pytest.mark.parametrize("shift", [0.0, 0.5, 5.0, 200.0])
@pytest.mark.parametrize("n", [2, 3, 5, 48, 1000])
def test_paired_t_in_the_tails(n: int, shift: float) -> None:
    values = list(np.random.default_rng(n).normal(shift, 1, n))
    expected = stats.ttest_1samp(values, 0).pvalue
    assert paired_t(values) == pytest.approx(expected, rel=1e-8, abs=1e-300)


def test_differences_that_do_not_vary() -> None:
    assert paired_t([0.0, 0.0, 0.0]) == 1.0
    assert paired_t([0.1, 0.1, 0.1]) is None
    assert paired_t([0.1]) is None
    assert wilcoxon([0.0, 0.0]) is None
    assert wilcoxon([]) is None


@given(st.lists(st.integers(-4, 4), min_size=1, max_size=9))
def test_wilcoxon_counts_all_signs(values: list[int]) -> None:
    kept = [v for v in values if v]
    found = wilcoxon(values)
    if not kept:
        assert found is None
        return
    order = stats.rankdata(np.abs(kept))
    seen = sum(r for r, v in zip(order, kept, strict=True) if v > 0)
    middle = sum(order) / 2
    sums = [
        sum(r for r, s in zip(order, signs, strict=True) if s) for signs in itertools.product([0, 1], repeat=len(kept))
    ]
    assert found == pytest.approx(np.mean([abs(s - middle) >= abs(seen - middle) - 1e-9 for s in sums]), abs=1e-12)


@pytest.mark.parametrize("n", [1, 4, 20, 60])
def test_wilcoxon_is_scipys_without_ties(n: int) -> None:
    values = np.random.default_rng(n).normal(0.3, 1, n)
    assert wilcoxon(list(values)) == pytest.approx(stats.wilcoxon(values, method="exact").pvalue, rel=1e-9)


def test_wilcoxon_of_many_is_nearly_scipys() -> None:
    values = np.random.default_rng(0).normal(0.1, 1, 400)
    assert wilcoxon(list(values)) == pytest.approx(stats.wilcoxon(values, correction=True).pvalue, rel=1e-2)


@pytest.mark.parametrize(("wins", "losses"), [(37, 11), (3, 0), (1, 1), (0, 5)])
def test_sign_test_is_binomial(wins: int, losses: int) -> None:
    assert sign_test(wins, losses) == pytest.approx(stats.binomtest(wins, wins + losses).pvalue)
    assert sign_test(0, 0) is None


def test_holm() -> None:
    assert holm([0.04, 0.01, None, 0.03]) == pytest.approx([0.06, 0.03, None, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=12))
def test_ranks_are_scipys(values: list[int]) -> None:
    assert ranks(values) == list(stats.rankdata(values))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=8))
def test_the_front_is_never_beaten(points: list[tuple[int, int, int]]) -> None:
    array, marks = np.array(points), front(points)
    best = array[marks]
    assert len(best)
    for p, mark in zip(array, marks, strict=True):
        beaten = ((best >= p).all(1) & (best > p).any(1)).any()  # by one of the front, and so by anyone
        assert mark is not bool(beaten)
