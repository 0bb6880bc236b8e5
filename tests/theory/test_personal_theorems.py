"""FedAIMS's Theorem 1, FedLAG's Theorem 5.3 and lemmas, FedMAP's Lemma 1 and Theorem 1."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fedloom import theory
from fedloom.errors import UserError

sizes = st.floats(0.05, 20.0)


def test_aims_by_hand() -> None:
    case = {"smoothness": 2.0, "noise": 0.2, "steps": 5}
    limit = theory.aims_step_limit(eps=1.0, kappa_sq=0.5, **case)
    assert limit.value == pytest.approx(2 * 0.5 / (2 * 2))
    below = theory.aims_step_limit(eps=0.5, kappa_sq=0.5, **case)
    assert np.isnan(below.value)
    assert "floor" in below.reason
    bound = theory.aims_bound(gap=3.0, eta=0.1, rounds=10, kappa_sq=0.5, **case)
    assert bound.value == pytest.approx((0.3 + 2 * 5 * 0.01 * 0.2 / 2 + 0.05) / (0.1 - 0.01))
    rounds = theory.aims_rounds(eps=1.0, gap=3.0, eta=0.1, kappa_sq=0.5, **case)
    assert rounds.value == pytest.approx(3 / (1.0 * 0.09 - 0.01 - 0.05))
    assert theory.aims_rounds(eps=0.4, gap=3.0, eta=0.1, kappa_sq=0.5, **case).value == np.inf
    assert theory.aims_bound(gap=3.0, eta=1.0, rounds=10, kappa_sq=0.5, **case).value == np.inf


@given(eps=sizes, kappa=st.floats(0, 20), smoothness=sizes, noise=sizes, steps=st.integers(1, 30))
def test_aims_step_limit_is_where_rounds_become_infinite(
    eps: float, kappa: float, smoothness: float, noise: float, steps: int
) -> None:
    case = {"eps": eps, "kappa_sq": kappa, "smoothness": smoothness, "noise": noise, "steps": steps}
    limit = theory.aims_step_limit(**case)
    if eps <= kappa:
        assert np.isnan(limit.value)
        assert theory.aims_rounds(**case, gap=1.0, eta=0.01).value == np.inf
        return
    assume(eps - kappa > 1e-3)
    assert limit.value <= 2 / smoothness
    inside = theory.aims_rounds(**case, gap=1.0, eta=0.99 * limit.value)
    assert np.isfinite(inside.value)
    assert theory.aims_rounds(**case, gap=1.0, eta=1.01 * limit.value).value == np.inf
    assume(inside.value >= 1)
    del case["eps"]
    at = theory.aims_bound(**case, gap=1.0, eta=0.99 * limit.value, rounds=inside.value)
    assert at.value == pytest.approx(eps, rel=1e-6)


def test_aims_jump_at_aggregation_is_larger_than_printed() -> None:
    smoothness, theta, kappa, eta = 2.0, 1.0, 0.5, 0.1
    jump = smoothness / 2 * ((theta + kappa) ** 2 - theta**2)
    assert jump > eta * kappa**2
    assert jump == pytest.approx(smoothness * theta * kappa + smoothness * kappa**2 / 2)
    case = {
        "gap": 1.0,
        "smoothness": smoothness,
        "noise": 0.0,
        "steps": 1,
        "kappa_sq": kappa**2,
        "rounds": 1e12,
    }
    floors = [
        theory.aims_bound(**case, eta=e, gradient=smoothness * theta, mode="sound").terms["floor"]
        for e in (0.4, 0.1, 0.01)
    ]
    assert floors == sorted(floors), "a smaller step does not help"
    assert floors[1] == pytest.approx(jump / (0.1 - 0.01))
    with pytest.raises(UserError, match="gradient is missing"):
        theory.aims_bound(**case, eta=0.1, mode="sound")


@pytest.mark.parametrize("steps", range(2, 21))
@pytest.mark.parametrize("smoothness", [0.1, 1.0, 7.0])
def test_lag_coefficient_is_negative_on_its_whole_interval(steps: int, smoothness: float) -> None:
    whole = theory.lag_interval(steps=steps, smoothness=smoothness)
    low, high, turn = whole.terms.values()
    assert low < high < turn
    etas = np.linspace(low, high, 2001)[1:-1]
    found = theory.lag_coefficient(eta=etas, steps=steps, smoothness=smoothness)
    assert found.conditions[0].everywhere
    assert np.all(found.value < 0)
    assert not np.any(found.claims[0].holds)
    assert np.all(found.value <= -(etas**2) * steps / 3)
    assert found.value.max() <= whole.value < 0
    assert not whole.claims[0].holds
    beyond = theory.lag_coefficient(eta=1.001 * turn, steps=steps, smoothness=smoothness)
    assert beyond.value > 0
    assert not beyond.conditions[0].holds


def test_lag_coefficient_by_hand() -> None:
    found = theory.lag_coefficient(eta=0.1, steps=3, smoothness=2.0)
    assert found.value == pytest.approx(24 * 9 * 2 * 1e-4 * 4 - 0.03)
    empty = theory.lag_interval(steps=1, smoothness=1.0)
    assert np.isnan(empty.value)
    assert "empty" in empty.reason


@given(st.lists(st.lists(st.floats(-3, 3), min_size=2, max_size=2), min_size=2, max_size=6))
def test_lemma_five_two_is_a_variance(rows: list[list[float]]) -> None:
    h = np.array(rows)
    users = len(h)
    printed = sum(u @ u - u @ v for u in h for v in h) / users**2
    found = theory.lag_variance(updates=h, eta=0.1, mode="paper")
    assert found.value == pytest.approx(-0.1 * printed, abs=1e-9)
    assert found.terms["variance of the updates"] == pytest.approx(h.var(axis=0).sum(), abs=1e-9)
    assert found.value <= 1e-12, "whether or not there is a conflict"
    users_ = theory.lag_gain(updates=h, eta=0.1, steps=4)
    assert users_.terms["mean over users"] == pytest.approx(
        theory.lag_variance(updates=h, eta=0.1, steps=4).value, abs=1e-9
    )


def test_lag_variance_without_any_conflict() -> None:
    found = theory.lag_variance(updates=(1.0, 3.0), eta=0.5, steps=2)
    assert found.value == -1.0
    assert not found.claims[0].holds


def test_not_every_user_gains() -> None:
    found = theory.lag_gain(updates=(0.1, 1.0, 1.0), eta=1.0)
    assert found.value[0] == pytest.approx(0.1 * 0.6)
    assert not found.claims[0].holds
    apart = theory.lag_gain(updates=(-1.0, 2.0), eta=1.0)
    assert apart.claims[0].holds
    assert apart.claims[1].holds
    with pytest.raises(UserError, match="at least two users"):
        theory.lag_gain(updates=(1.0,), eta=1.0)


def test_lag_prediction_matches_the_loss_to_first_order() -> None:
    rng = np.random.default_rng(1)
    centre, curvature, start, eta, steps = (
        rng.normal(size=(4, 3)),
        np.array([0.5, 1.0, 2.0]),
        np.zeros(3),
        1e-5,
        7,
    )
    ends = centre + (1 - eta * curvature) ** steps * (start - centre)
    h = ends - start

    def loss(models: np.ndarray) -> float:
        return float((curvature * (models - centre) ** 2 / 2).sum(axis=1).mean())

    true = loss(ends) - loss(np.broadcast_to(ends.mean(axis=0), ends.shape))
    assert theory.lag_variance(updates=h, eta=eta, steps=steps).value == pytest.approx(true, rel=1e-3)
    printed = theory.lag_variance(updates=h, eta=eta, steps=steps, mode="paper").value
    assert abs(printed) < 1e-6 * abs(true), "eta for 1/(eta E) is wrong by eta^2 E"


@given(d=st.floats(-20, 20), s=st.floats(-0.9, 10), eps=st.floats(1e-3, 1))
def test_map_hessian_by_finite_differences(d: float, s: float, eps: float) -> None:
    def prior(x: np.ndarray) -> float:
        return (x[0] - x[1]) ** 2 / (2 * (x[2] + 1)) + eps * (x[2] ** 2 + x[1] ** 2)

    at, step, eye = np.array([d + 0.3, 0.3, s]), 1e-3 * (s + 1), np.eye(3)
    numeric = np.array(
        [
            [
                sum(a * b * prior(at + step * (a * eye[i] + b * eye[j])) for a in (1, -1) for b in (1, -1))
                / (4 * step**2)
                for j in range(3)
            ]
            for i in range(3)
        ]
    )
    exact = theory.map_hessian(d, s, eps=eps)
    assert exact == pytest.approx(numeric, rel=1e-3, abs=1e-3 * np.abs(exact).max())
    assert np.linalg.det(exact) == pytest.approx(4 * eps**2 / (s + 1), rel=1e-6)
    least = theory.map_curvature(distance=d, s=s, eps=eps)
    assert least.value == pytest.approx(np.linalg.eigvalsh(exact)[0], rel=1e-5, abs=1e-12 * np.abs(exact).max())
    assert 0 < least.value <= least.terms["upper bound"] * (1 + 1e-9)


def test_printed_map_hessian() -> None:
    d, s, eps = 3.0, 1.0, 0.1
    a, da, dda = 1 / 2, -1 / 4, 2 / 8
    printed = [
        [2 * a, -2 * a, 2 * da * d],
        [-2 * a, 2 * a + eps, -2 * da * d],
        [2 * da * d, -2 * da * d, dda * d**2 + eps],
    ]
    assert theory.map_hessian(d, s, eps=eps, mode="paper") == pytest.approx(np.array(printed))
    paper = theory.map_curvature(distance=d, s=s, eps=eps, mode="paper")
    assert paper.value == pytest.approx(np.linalg.eigvalsh(printed)[0])
    assert paper.value <= paper.terms["upper bound"]


def test_learnable_prior_is_strictly_but_not_strongly_convex() -> None:
    far = theory.map_curvature(distance=np.array([0.0, 1e2, 1e4, 1e6]), eps=1e-2)
    assert far.valid
    assert np.all(np.diff(far.value) < 0)
    assert far.value[-1] == pytest.approx(2e-2 / 1e12, rel=1e-3)
    boxes = [theory.map_convex_on_box(distance=r, s_low=-0.5, s_high=4.0, points=41) for r in (1.0, 10.0, 1000.0)]
    assert all(box.valid and not box.claims[0].holds for box in boxes)
    assert boxes[0].value > boxes[1].value > boxes[2].value > 0
    assert boxes[1].terms["at |theta - mu|"] == 10.0
    with pytest.raises(UserError, match="s_low"):
        theory.map_convex_on_box(distance=1.0, s_low=-1.0, s_high=1.0)
    with pytest.raises(UserError, match="at least 2"):
        theory.map_convex_on_box(distance=1.0, s_low=0.0, s_high=1.0, points=1)


@given(a=sizes, b=st.floats(-5, 5), gamma=st.floats(-5, 5), sigma2=sizes)
def test_map_update_minimises(a: float, b: float, gamma: float, sigma2: float) -> None:
    theta = theory.map_update(curvature=a, centre=b, gamma=gamma, sigma2=sigma2).value
    assert a * (theta - b) + (theta - gamma) / sigma2 == pytest.approx(0, abs=1e-9 * (a + 1 / sigma2) * 10)


def test_map_update_limits() -> None:
    case = {"curvature": 2.0, "centre": 3.0, "gamma": -1.0}
    assert theory.map_update(**case, sigma2=np.inf).value == 3.0
    assert theory.map_update(**case, sigma2=1e-12).value == pytest.approx(-1.0)
    free = theory.map_update(curvature=0.0, centre=3.0, gamma=-1.0, sigma2=np.inf)
    assert np.isnan(free.value)
    assert free.reason


@given(
    a=st.lists(sizes, min_size=3, max_size=3),
    b=st.lists(st.floats(-5, 5), min_size=3, max_size=3),
    w=st.lists(st.floats(0.1, 1), min_size=3, max_size=3),
    gamma=st.floats(-5, 5),
    sigma2=st.floats(0.1, 5),
)
def test_map_round_is_gradient_descent_on_the_envelope(
    a: list[float], b: list[float], w: list[float], gamma: float, sigma2: float
) -> None:
    def after(g: float) -> theory.Answer:
        return theory.map_round(curvatures=a, centres=b, weights=w, gamma=g, sigma2=sigma2)

    found, step = after(gamma), 1e-4
    slope = (after(gamma + step).terms["M(gamma)"] - after(gamma - step).terms["M(gamma)"]) / (2 * step)
    assert found.value == pytest.approx(gamma - sigma2 * slope, abs=1e-6)
    share = np.array(w) / sum(w)
    thetas = theory.map_update(curvature=np.array(a), centre=np.array(b), gamma=gamma, sigma2=sigma2).value
    assert found.value == pytest.approx(share @ thetas)
    losses = np.array(a) * (thetas - b) ** 2 / 2 + (thetas - gamma) ** 2 / (2 * sigma2)
    assert found.terms["M(gamma)"] == pytest.approx(share @ losses)
    rest = found.terms["gamma*"]
    assert after(rest).value == pytest.approx(rest)
    assert found.value - rest == pytest.approx(found.terms["contraction"] * (gamma - rest), abs=1e-9)


def test_map_round_freezes_as_sigma_falls() -> None:
    case = {"curvatures": (1.0, 2.0), "centres": (4.0, -1.0), "weights": (1, 1), "gamma": 0.5}
    moves = [abs(theory.map_round(**case, sigma2=s).value - 0.5) for s in (1.0, 1e-2, 1e-6)]
    assert moves[0] > moves[1] > moves[2]
    assert moves[2] < 1e-5
    with pytest.raises(UserError, match="do not fit"):
        theory.map_round(**{**case, "weights": (1, 1, 1)}, sigma2=1.0)
