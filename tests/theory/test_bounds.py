"""The bounds against hand-computed values, each other, and exact moments of real iterations."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedloom import theory
from fedloom.errors import UserError

CASE = {"gap": 1.0, "eta": 1.0, "rounds": 100, "smoothness": 2.0}
sizes = st.floats(0.05, 20.0)
counts = st.integers(1, 40)


def test_smoothness_is_the_sum_not_the_maximum() -> None:
    given_ = {"ce": 1.0, "mi": (4.0, 2.0), "ne": (3.0, 3.0), "alpha": (0.5,), "lam": (0.1, 1.0)}
    assert theory.smoothness(**given_, mode="paper").value == 3.0
    assert theory.smoothness(**given_).value == pytest.approx(1 + 2 + 1 + 0.3 + 3)


def test_squared_bounds() -> None:
    given_ = {"ce": 1.0, "mi": (4.0, 4.0), "ne": (1.0, 1.0), "alpha": (0.5,), "lam": (2.0,)}
    assert theory.squared_bound(**given_, mode="paper").value == 1 + 1 + 1 + 4 + 4
    assert theory.squared_bound(**given_).value == 5 * 11
    assert theory.squared_bound(**given_).terms["square of the sum"] == pytest.approx((1 + 1 + 1 + 2 + 2) ** 2)
    plain = theory.squared_bound(ce=3.0, mi=(4.0,), ne=(4.0,), alpha=(0.0,), lam=(0.0,))
    assert plain.value == 3.0, "without ISR nothing may be added"


@given(parts=st.lists(st.floats(-5, 5), min_size=3, max_size=3), weights=st.tuples(sizes, sizes))
def test_sound_squared_bound_holds_for_dependent_parts(parts: list[float], weights: tuple[float, float]) -> None:
    ce, mi, ne = parts
    bound = theory.squared_bound(ce=ce**2, mi=(mi**2,), ne=(ne**2,), alpha=(weights[0],), lam=(weights[1],))
    total = (ce + weights[0] * mi + weights[1] * ne) ** 2
    assert total <= bound.terms["square of the sum"] * (1 + 1e-9) + 1e-12
    assert bound.terms["square of the sum"] <= bound.value * (1 + 1e-9) + 1e-12


def test_heterogeneity() -> None:
    assert theory.heterogeneity(weights=(0.5, 0.5), gradients=(1.0, -1.0)).value == 1.0
    rows = np.array([[1.0, 0.0], [1.0, 4.0]])
    assert theory.heterogeneity(weights=(3, 1), gradients=rows).value == pytest.approx(0.75 * 1 + 0.25 * 9)
    assert theory.heterogeneity(weights=(1, 2), gradients=((2.0, 1.0), (2.0, 1.0))).value == 0
    with pytest.raises(UserError, match=r"2 weights .* 3 gradients"):
        theory.heterogeneity(weights=(1, 1), gradients=(1.0, 2.0, 3.0))


def test_contraction() -> None:
    kappa = theory.contraction(with_isr=np.array([1.0, 3.0]), without=np.array([2.0, 2.0]))
    assert kappa.value.tolist() == [0.5, 1.5]
    assert kappa.claims[0].holds.tolist() == [True, False]
    none = theory.contraction(with_isr=1.0, without=0.0)
    assert np.isnan(none.value)
    assert "nothing to lower" in none.reason


def test_local_steps() -> None:
    assert theory.local_steps(epochs=5, samples=500, batch=64).value == 40
    assert theory.local_steps(epochs=1, samples=64, batch=64).value == 1


def test_drift_grows_with_the_square_of_the_steps() -> None:
    given_ = {"eta_t": 0.1, "grad_sq": 1.0, "heterogeneity": 2.0, "noise": 3.0, "c": 5.0}
    once, twice = (theory.drift_bound(**given_, steps=k).value for k in (3, 6))
    assert once == pytest.approx(5 * 0.01 * 9 * 6)
    assert twice == pytest.approx(4 * once)


def _local(a: np.ndarray, b: np.ndarray, step: float, steps: int, noise: float) -> tuple[np.ndarray, np.ndarray]:
    """Exact mean and variance after local steps from 0 on (a/2)(y - b)^2 with gradient noise."""
    mean, var = np.zeros_like(b), np.zeros_like(b)
    for _ in range(steps):
        mean, var = mean - step * a * (mean - b), (1 - step * a) ** 2 * var + step**2 * noise
    return mean, var


@given(
    curvature=st.lists(st.floats(-1.0, 1.0), min_size=2, max_size=2),
    centre=st.lists(st.floats(-3, 3), min_size=2, max_size=2),
    weight=st.floats(0.1, 0.9),
    reach=st.floats(0.01, 20.0),
    steps=counts,
    noise=st.floats(0, 4),
)
def test_sound_drift_bound_holds_for_every_step_size(
    curvature: list[float], centre: list[float], weight: float, reach: float, steps: int, noise: float
) -> None:
    a, b, w = np.array(curvature), np.array(centre), np.array([weight, 1 - weight])
    step = reach / steps
    mean, var = _local(a, b, step, steps, noise)
    start = -a * b
    bound = theory.drift_bound(
        eta_t=step,
        steps=steps,
        grad_sq=(w @ start) ** 2,
        heterogeneity=theory.heterogeneity(weights=w, gradients=start).value,
        noise=noise,
        smoothness=1.0,
        mode="sound",
    )
    assert w @ (mean**2 + var) <= bound.value * (1 + 1e-9) + 1e-300
    if reach <= 1:
        assert bound.terms["C"] < 6


def test_no_absolute_constant_makes_the_printed_drift_bound_true() -> None:
    mean, _ = _local(np.array([1.0]), np.array([1.0]), 4.0, 20, 0.0)
    for c in (1.0, 1e3, 1e6):
        printed = theory.drift_bound(eta_t=4.0, steps=20, grad_sq=1.0, heterogeneity=0, noise=0, c=c)
        assert mean[0] ** 2 > printed.value
    with pytest.raises(UserError, match="smoothness is missing"):
        theory.drift_bound(eta_t=4.0, steps=20, grad_sq=1.0, heterogeneity=0, noise=0, mode="sound")
    endless = theory.drift_bound(
        eta_t=1e9, steps=1e9, grad_sq=1.0, heterogeneity=0, noise=0, smoothness=1.0, mode="sound"
    )
    assert np.isinf(endless.value)
    assert "beyond any number" in endless.reason


def test_centralised_bound() -> None:
    bound = theory.cl_bound(**CASE, second_moment=3.0)
    assert bound.value == pytest.approx(0.8)
    assert bound.terms == pytest.approx({"initial gap": 0.2, "variance": 0.6})
    assert bound.valid
    assert bound.reason == ""
    wild = theory.cl_bound(gap=1.0, eta=100.0, rounds=4, smoothness=2.0, second_moment=3.0)
    assert not wild.valid
    assert not wild.claims[0].holds


@given(gap=sizes, smoothness=sizes, moment=sizes, rounds=st.integers(1, 10**6), factor=st.floats(0.2, 5))
def test_best_centralised_step(gap: float, smoothness: float, moment: float, rounds: int, factor: float) -> None:
    best = theory.cl_best_step(gap=gap, smoothness=smoothness, second_moment=moment, rounds=rounds)
    assert best.value == pytest.approx(np.sqrt(2 * gap / (smoothness * moment)))
    case = {"gap": gap, "smoothness": smoothness, "second_moment": moment, "rounds": rounds}
    least = theory.cl_bound(**case, eta=best.value).value
    assert least == pytest.approx(best.terms["bound at eta*"]) == 2 * np.sqrt(2 * gap * smoothness * moment / rounds)
    assert theory.cl_bound(**case, eta=factor * best.value).value >= least * (1 - 1e-12)


def test_federated_bound_by_hand() -> None:
    case = {**CASE, "second_moment": 3.0, "steps": 1, "heterogeneity": 1.0}
    bound = theory.fl_bound(**case)
    assert bound.value == pytest.approx((0.2 + 0.6 + 0.2) / 0.8)
    assert [c.holds for c in bound.conditions] == [True]
    assert not bound.claims[0].holds, "L eta sqrt(T) c K^2 = 20"
    printed = theory.fl_bound(**case, mode="paper")
    assert printed.value == np.inf
    assert "as printed" in printed.reason
    assert [c.holds for c in printed.conditions] == [False, True]
    beyond = theory.fl_bound(**{**case, "steps": 3})
    assert beyond.value == np.inf
    assert "L eta c K^2 / sqrt(T) < 1 fails" in beyond.reason


@given(
    gap=sizes,
    eta=st.floats(1e-4, 10),
    rounds=st.integers(1, 10**6),
    moment=sizes,
    steps=counts,
    h=sizes,
    c=sizes,
)
def test_federated_bound_solves_the_printed_one(
    gap: float, eta: float, rounds: int, moment: float, steps: int, h: float, c: float
) -> None:
    case = {"gap": gap, "eta": eta, "rounds": rounds, "smoothness": 1.5}
    local = {"second_moment": moment, "steps": steps, "heterogeneity": h, "c": c}
    sound, paper = theory.fl_bound(**case, **local), theory.fl_bound(**case, **local, mode="paper")
    assert sound.value <= paper.value
    if np.isfinite(sound.value):
        a, root = sound.value, np.sqrt(rounds)
        right = 2 * gap / (eta * root) + 1.5 * eta / root * (moment + c * steps**2 * (a + h))
        assert a == pytest.approx(right, rel=1e-6)
        assert a >= theory.cl_bound(**case, second_moment=moment).value
    if np.isfinite(paper.value):
        # The printed condition makes the theorem empty: no number of rounds gets below this.
        assert paper.value > 2 * 1.5 * gap * c * steps**2
        assert paper.value == sound.value


@given(
    curvature=st.lists(st.floats(0.05, 1.0), min_size=3, max_size=3),
    centre=st.lists(st.floats(-3, 3), min_size=3, max_size=3),
    counts_=st.lists(st.integers(1, 9), min_size=3, max_size=3),
    eta=st.floats(0.01, 3.0),
    rounds=st.integers(1, 200),
    steps=st.integers(1, 10),
    noise=st.floats(0, 2),
)
def test_explicit_federated_bound_holds_on_quadratics(
    curvature: list[float],
    centre: list[float],
    counts_: list[int],
    eta: float,
    rounds: int,
    steps: int,
    noise: float,
) -> None:
    a, b = np.array(curvature), np.array(centre)
    w = np.array(counts_) / sum(counts_)
    step, slope = eta / np.sqrt(rounds), w @ a
    middle = w @ (a * b) / slope
    # Averaged local SGD on quadratics is linear in theta: exact mean and variance of it, round by round.
    shrink = (1 - step * a) ** steps
    fresh = w**2 @ sum((1 - step * a) ** (2 * e) for e in range(steps)) * step**2 * noise
    mean, var, squares, spread = 0.0, 0.0, [], []
    for _ in range(rounds):
        squares.append(slope**2 * ((mean - middle) ** 2 + var))
        gaps = a * (mean - b) - slope * (mean - middle)
        spread.append(w @ (gaps**2 + (a - slope) ** 2 * var))
        mean, var = w @ (shrink * mean + (1 - shrink) * b), (w @ shrink) ** 2 * var + fresh
    bound = theory.fl_bound_explicit(
        gap=slope * middle**2 / 2,
        eta=eta,
        rounds=rounds,
        smoothness=a.max(),
        noise=noise,
        steps=steps,
        heterogeneity=np.mean(spread),
    )
    assert np.mean(squares) <= bound.value * (1 + 1e-9) + 1e-12
    assert bound.valid == (bound.reason == "")


def test_bounds_broadcast_along_a_curve() -> None:
    rounds = np.array([1.0, 4.0, 100.0])
    bound = theory.fl_bound(
        gap=1.0, eta=1.0, rounds=rounds, smoothness=2.0, second_moment=3.0, steps=1, heterogeneity=1.0
    )
    assert np.isinf(bound.value).tolist() == [True, True, False]
    assert bound.value[2] == pytest.approx(1.25)
    assert bound.reason.startswith("at 2 of 3 points")
    assert not bound.valid
    assert "at 1 of 3 points" in bound.summary()


@pytest.mark.parametrize("wrong", [{"eta": 0.0}, {"eta": float("nan")}, {"rounds": 0}, {"gap": -1}, {"gap": np.inf}])
def test_numbers_out_of_range_are_refused_by_name(wrong: dict[str, float]) -> None:
    with pytest.raises(UserError, match=next(iter(wrong))):
        theory.cl_bound(**{**CASE, "second_moment": 1.0, **wrong})


def test_unknown_mode_and_words_are_refused() -> None:
    with pytest.raises(UserError, match="'literal' is unknown"):
        theory.effective_noise(alphas=(0.5,), cloud=1, federated=1, mode="literal")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="is not a number"):
        theory.local_steps(epochs="many", samples=1, batch=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("steps", "reach", "constant"), [(1, 0.7, 2.0), (2, 2.0, 4.5), (10**6, 1.0, 2 * (np.e - 1) ** 2)]
)
def test_sound_drift_constant_by_hand(steps: int, reach: float, constant: float) -> None:
    bound = theory.drift_bound(
        eta_t=reach / steps, steps=steps, grad_sq=1.0, heterogeneity=2.0, noise=3.0, smoothness=1.0, mode="sound"
    )
    assert bound.terms["C"] == pytest.approx(constant, rel=1e-5)
    assert bound.value == pytest.approx(constant * reach**2 * 6, rel=1e-5)
