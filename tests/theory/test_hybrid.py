"""Hybrid training: effective bias and noise, the bound, rounds to eps, and conflict of the two gradients."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fedloom import theory
from fedloom.errors import UserError

shares = st.lists(st.floats(0, 1), min_size=1, max_size=6)
sizes = st.floats(0.05, 20.0)
vectors = st.lists(st.floats(-5, 5), min_size=3, max_size=3)


def test_effective_noise_by_hand() -> None:
    half = theory.effective_noise(alphas=(0.5,), cloud=2.0, federated=2.0)
    assert half.value == 1.0
    assert not half.claims[0].holds
    case = {"alphas": (0.2, 0.8), "cloud": 1.0, "federated": 0.0}
    assert theory.effective_noise(**case, mode="paper").value == pytest.approx(0.04)
    assert theory.effective_noise(**case).value == pytest.approx(0.64)
    case = {"alphas": (0.2, 0.9), "cloud": 4.0, "federated": 1.0}
    assert theory.effective_noise(**case, mode="paper").value == pytest.approx(0.8)
    assert theory.effective_noise(**case).value == pytest.approx(3.25)


@given(alphas=shares, cloud=sizes, federated=sizes)
def test_effective_noise_is_ordered_and_never_enlarged(alphas: list[float], cloud: float, federated: float) -> None:
    case = {"alphas": alphas, "cloud": cloud, "federated": federated}
    paper, sound = theory.effective_noise(**case, mode="paper"), theory.effective_noise(**case)
    assert paper.value <= sound.value <= max(cloud, federated) * (1 + 1e-12)
    for a in alphas:
        assert a**2 * cloud + (1 - a) ** 2 * federated <= sound.value * (1 + 1e-12)


def test_effective_bias_by_hand() -> None:
    assert theory.effective_bias(alphas=(0.5,), cloud=(3.0, 0.0), federated=(0.0, 4.0)).value == 2.5
    rows = [[1.0, 0.0], [0.0, 2.0]]
    assert theory.effective_bias(alphas=(1.0, 0.0), cloud=rows, federated=rows).value == 2.0
    with pytest.raises(UserError, match="do not fit 3 mixing weights"):
        theory.effective_bias(alphas=(0.1, 0.2, 0.3), cloud=rows, federated=rows)


def test_hybrid_bound_by_hand() -> None:
    case = {"gap": 1.0, "eta": 1.0, "rounds": 100, "smoothness": 2.0, "noise": 1.0, "bias": 0.1}
    bound = theory.hybrid_bound(**case, alpha_min=0.5)
    assert bound.value == pytest.approx(0.2 + 0.1 + 0.01)
    assert bound.valid
    alternating = theory.hybrid_bound(**case, alpha_min=0.0)
    assert alternating.value == np.inf
    assert "alternating" in alternating.reason
    assert theory.hybrid_bound_explicit(**case).value == pytest.approx(0.4 + 0.4 + 0.03)
    fast = theory.hybrid_bound_explicit(**{**case, "eta": 2.0})
    assert fast.value == np.inf
    assert "sqrt(T)/4" in fast.reason


@given(
    curvature=st.floats(0.05, 1.0),
    start=st.floats(-5, 5),
    eta=st.floats(0.01, 2.5),
    rounds=st.integers(1, 150),
    cloud=st.floats(-1, 1),
    federated=st.floats(-1, 1),
    noises=st.tuples(st.floats(0, 2), st.floats(0, 2)),
)
def test_explicit_hybrid_bound_holds_under_alternating_mixing(
    curvature: float,
    start: float,
    eta: float,
    rounds: int,
    cloud: float,
    federated: float,
    noises: tuple[float, float],
) -> None:
    alphas = np.arange(1, rounds + 1) % 2
    step, mean, var, squares = eta / np.sqrt(rounds), start, 0.0, []
    for a in alphas:
        squares.append(curvature**2 * (mean**2 + var))
        push = a * cloud + (1 - a) * federated
        mean, var = (
            mean - step * (curvature * mean + push),
            (1 - step * curvature) ** 2 * var + step**2 * (a**2 * noises[0] + (1 - a) ** 2 * noises[1]),
        )
    bound = theory.hybrid_bound_explicit(
        gap=curvature * start**2 / 2,
        eta=eta,
        rounds=rounds,
        smoothness=curvature,
        noise=theory.effective_noise(alphas=alphas, cloud=noises[0], federated=noises[1]).value,
        bias=theory.effective_bias(alphas=alphas, cloud=(cloud,), federated=(federated,)).value,
    )
    assert np.mean(squares) <= bound.value * (1 + 1e-9) + 1e-12


def test_hybrid_rounds_by_hand() -> None:
    case = {"eps": 0.3, "gap": 2.0, "alpha_min": 0.25, "noise": 3.0, "bias": 0.1, "c": 2.0}
    room = 0.3 - 2 * 0.01
    assert theory.rounds_hybrid(**case).value == pytest.approx(4 * 4 * 2 * 3 / (0.25 * room**2))
    assert theory.rounds_hybrid(**case, mode="paper").value == pytest.approx(4 * 4 * 2 * 3 / (0.25**2 * room**2))
    fixed = (2 * (2 / (0.25 * 0.5) + 0.5 * 3) / room) ** 2
    for mode in ("paper", "sound"):
        assert theory.rounds_hybrid(**case, eta=0.5, mode=mode).value == pytest.approx(fixed)
    floor = theory.rounds_hybrid(**{**case, "eps": 0.02})
    assert floor.value == np.inf
    assert "bias floor" in floor.reason
    assert theory.rounds_hybrid(**{**case, "alpha_min": 0.0}).value == np.inf
    assert theory.rounds_hybrid(**{**case, "noise": 0.0}).value == 0.0


@given(eps=sizes, gap=sizes, share=st.floats(0.01, 1), noise=sizes, factor=st.floats(0.2, 5))
def test_hybrid_rounds_turn_the_bound_round(eps: float, gap: float, share: float, noise: float, factor: float) -> None:
    case = {"eps": eps, "gap": gap, "alpha_min": share, "noise": noise, "bias": 0.1}
    assume(eps > 0.011)
    best = theory.rounds_hybrid(**case)
    assert best.value <= theory.rounds_hybrid(**case, mode="paper").value
    assert best.terms["eta"] == pytest.approx(np.sqrt(gap / (share * noise)))
    assert best.value <= theory.rounds_hybrid(**case, eta=factor * best.terms["eta"]).value * (1 + 1e-9)
    assume(best.value >= 1)
    back = theory.hybrid_bound(
        gap=gap,
        eta=best.terms["eta"],
        rounds=best.value,
        smoothness=1.0,
        alpha_min=share,
        noise=noise,
        bias=0.1,
    )
    assert back.value == pytest.approx(eps)


@given(eps=st.floats(0.1, 5), gap=sizes, smoothness=sizes, noise=sizes, eta=st.none() | st.floats(0.01, 10))
def test_explicit_hybrid_rounds_turn_their_bound_round(
    eps: float, gap: float, smoothness: float, noise: float, eta: float | None
) -> None:
    found = theory.rounds_hybrid_explicit(eps=eps, gap=gap, smoothness=smoothness, noise=noise, bias=0.1, eta=eta)
    assert found.valid
    back = theory.hybrid_bound_explicit(
        gap=gap,
        eta=found.terms["eta"],
        rounds=max(1.0, found.value * (1 + 1e-9)),
        smoothness=smoothness,
        noise=noise,
        bias=0.1,
    )
    assert back.value <= eps * (1 + 1e-9)
    assert theory.rounds_hybrid_explicit(eps=0.03, gap=1, smoothness=1, noise=1, bias=0.1).value == np.inf


@given(g=vectors, b=vectors, f=vectors, noise=sizes)
def test_inner_product(g: list[float], b: list[float], f: list[float], noise: float) -> None:
    case = {"gradient": g, "bias_cloud": b, "bias_federated": f}
    found = theory.inner_product(**case)
    assert found.value == pytest.approx(np.dot(np.add(g, b), np.add(g, f)), abs=1e-9)
    assert sum(found.terms.values()) == pytest.approx(found.value, abs=1e-9)
    norms = [float(np.linalg.norm(v)) for v in (g, b, f)]
    least = theory.non_conflict(gradient=norms[0], bias_cloud=norms[1], bias_federated=norms[2])
    assert least.value <= found.value + 1e-9
    if norms[1] ** 2 + norms[2] ** 2 <= norms[0] ** 2:
        assert found.value >= -1e-9
    if norms[1] + norms[2] < norms[0]:
        assert least.conditions[0].holds
        assert least.value >= 0
    worst = theory.inner_product(**case, noise_cloud=noise, noise_federated=noise, mode="paper")
    assert worst.value == pytest.approx(found.value - noise, abs=1e-9)
    assert theory.inner_product(**case, noise_cloud=noise, noise_federated=noise).value == found.value


@pytest.mark.parametrize(("a", "b"), [(0.3, 0.5), (0.6, 0.8), (0.9, 0.9), (2.5, 0.4), (0.2, 1.9), (0.0, 0.0)])
def test_least_inner_product_is_attained(a: float, b: float) -> None:
    turns = np.linspace(0, 2 * np.pi, 721)
    cloud = a * np.stack([np.cos(turns), np.sin(turns)], axis=-1)[:, None]
    federated = b * np.stack([np.cos(turns), np.sin(turns)], axis=-1)[None, :]
    true = np.array([1.0, 0.0])
    products = ((cloud + true) * (federated + true)).sum(axis=-1)
    least = theory.non_conflict(gradient=1.0, bias_cloud=a, bias_federated=b)
    assert least.value == pytest.approx(products.min(), abs=1e-4)
    assert (least.value >= -1e-12) == (a**2 + b**2 <= 1 + 1e-12)


def test_inner_product_refuses_vectors_of_different_length() -> None:
    with pytest.raises(UserError, match="three vectors of one length"):
        theory.inner_product(gradient=(1.0, 2.0), bias_cloud=(1.0,), bias_federated=(1.0, 2.0))
