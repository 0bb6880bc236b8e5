"""The escape time: values, trends, the corrected form against simulation, the picture, the measured round."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fedloom import theory
from fedloom.errors import UserError


def test_escape_time_by_hand() -> None:
    plain = theory.escape_time(eta=0.5, gamma=0.2, radius=np.e, bias=0.0, noise=0.0)
    assert plain.value == pytest.approx(10.0)
    full = theory.escape_time(eta=0.1, gamma=0.4, radius=20, delta=0.02, start=2, bias=0.3, noise=0.2, c0=3)
    head = 2 - 0.1 * 0.3 / 0.4 - 0.2 * 0.5 * np.sqrt(np.log(100))
    assert full.terms["d"] == pytest.approx(head)
    assert full.value == pytest.approx(np.log(60 / head) / 0.04)


@given(eta=st.floats(0.01, 1), gamma=st.floats(0.01, 1), radius=st.floats(2, 100))
def test_tenfold_radius_adds_a_constant(eta: float, gamma: float, radius: float) -> None:
    near, far = (theory.escape_time(eta=eta, gamma=gamma, radius=r).value for r in (radius, 10 * radius))
    assume(np.isfinite(near))
    assert far - near == pytest.approx(np.log(10) / (eta * gamma), rel=1e-6)


@pytest.mark.parametrize("gamma", [0.01, 0.05, 0.3, 1.0])
def test_best_step_is_proportional_to_curvature(gamma: float) -> None:
    best = theory.escape_best_step(gamma=gamma)
    assert best.value / gamma == pytest.approx(7.56, abs=0.005)
    etas = np.linspace(0.2, 1.2, 20001) * best.value
    times = theory.escape_time(eta=etas, gamma=gamma).value
    assert etas[np.nanargmin(times)] == pytest.approx(best.value, rel=1e-3)


def test_best_step_without_a_minimum() -> None:
    assert theory.escape_best_step(bias=0.0, noise=0.0).value == np.inf
    outside = theory.escape_best_step(radius=0.5)
    assert np.isnan(outside.value)
    assert "outside" in outside.reason
    for case in ({"bias": 0.0}, {"noise": 0.0}):
        best = theory.escape_best_step(**case)
        around = theory.escape_time(eta=best.value * np.array([0.99, 1.0, 1.01]), gamma=1.0, **case).value
        assert around[1] < min(around[0], around[2])


def test_trends_of_figure_seven() -> None:
    found = {c.name[:3]: c.everywhere for c in theory.escape_trends()[:4]}
    assert found == {"(a)": True, "(b)": True, "(c)": True, "(d)": True}
    assert not any(c.everywhere for c in theory.escape_trends()[4:])
    noisy = theory.escape_trends(bias=0.01, noise=0.3, radius=50.0)
    assert [c.everywhere for c in noisy] == [True] * 4 + [False] * 3


@given(
    eta=st.floats(0.01, 1), gamma=st.floats(0.05, 2), noise=st.floats(0, 0.3), bias=st.floats(0, 0.05),
    mode=st.sampled_from(["paper", "sound"]),
)  # fmt: skip
def test_bias_and_noise_slow_the_escape(eta: float, gamma: float, noise: float, bias: float, mode: str) -> None:
    def time(**changed: float) -> float:
        case = {"eta": eta, "gamma": gamma, "noise": noise, "bias": bias, **changed}
        return theory.escape_time(**case, mode=mode).value  # type: ignore[arg-type]

    assume(np.isfinite(time(noise=noise + 0.05, bias=bias + 0.02)))
    assert time() < time(noise=noise + 0.05)
    assert time() < time(bias=bias + 0.02)
    assert time(delta=0.05) >= time(delta=0.2)
    assert not theory.escape_time(eta=eta, gamma=gamma, noise=noise, bias=bias).claims[0].holds


def test_there_is_no_bound_for_every_delta() -> None:
    answer = theory.escape_time(eta=0.1, gamma=0.02)
    least = answer.terms["least delta with a bound"]
    assert 0 < least < 0.1
    assert np.isfinite(theory.escape_time(eta=0.1, gamma=0.02, delta=least * 1.001).value)
    below = theory.escape_time(eta=0.1, gamma=0.02, delta=least * 0.999)
    assert np.isnan(below.value)
    assert "d <= 0" in below.reason
    assert theory.escape_time(eta=0.1, gamma=0.02, noise=0.0).terms["least delta with a bound"] == 0
    inside = theory.escape_time(eta=0.1, gamma=0.5, radius=0.5)
    assert np.isnan(inside.value)
    assert "outside" in inside.reason
    assert np.isnan(theory.escape_time(eta=1.0, gamma=0.1).value), "eta/gamma = 10 is beyond 9.39"


def test_printed_escape_time_is_too_short_and_the_sound_one_is_not() -> None:
    case = {"eta": 0.1, "gamma": 1.0, "bias": 0.5, "noise": 0.0, "radius": 10.0}
    y, steps = 1.0, 0
    while y < 10:
        y, steps = (1 + 0.1 * 1.0) * y - 0.1 * 0.5, steps + 1
    assert steps == 31
    assert theory.escape_time(**case).value == pytest.approx(23.54, abs=0.01)
    assert steps - 1 < theory.escape_time(**case, mode="sound").value


@pytest.mark.parametrize(("eta", "gamma", "noise"), [(0.1, 0.5, 0.3), (0.3, 0.2, 0.2), (0.9, 1.0, 0.3)])
def test_sound_escape_time_covers_noisy_runs(eta: float, gamma: float, noise: float) -> None:
    delta, bias = 0.2, 0.05
    steps = theory.escape_time(eta=eta, gamma=gamma, noise=noise, bias=bias, delta=delta, mode="sound").value
    rng = np.random.default_rng(0)
    y, out = np.ones(4000), np.zeros(4000, dtype=bool)
    for _ in range(int(np.ceil(steps))):
        y = (1 + eta * gamma) * y - eta * (bias + noise * rng.standard_normal(y.size))
        out |= np.abs(y) >= 10
    assert out.mean() >= 1 - delta


@given(eta=st.floats(0.01, 1), gamma=st.floats(0.05, 2), noise=st.floats(0, 0.3), bias=st.floats(0, 0.05))
def test_sound_escape_is_never_shorter(eta: float, gamma: float, noise: float, bias: float) -> None:
    case = {"eta": eta, "gamma": gamma, "noise": noise, "bias": bias}
    paper, sound = (theory.escape_time(**case, mode=m).value for m in ("paper", "sound"))
    assert np.isnan(sound) or paper <= sound


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_picture_has_four_panels_and_is_repeatable(tmp_path: Path, ending: str) -> None:
    first = theory.draw_escape(tmp_path / f"a.{ending}")
    second = theory.draw_escape(tmp_path / f"b.{ending}")
    assert first.read_bytes() == second.read_bytes()
    assert first.read_bytes()[:4] in (b"\x89PNG", b"<?xm")
    if ending == "svg":
        sound = theory.draw_escape(tmp_path / "c.svg", mode="sound", noise=0.2)
        assert sound.read_bytes() != first.read_bytes()
        assert all(f'id="axes_{i}"' in first.read_text() for i in (1, 2, 3, 4))


def test_curves_of_the_picture_follow_the_formula() -> None:
    curves = theory.escape_curves()
    assert list(curves) == ["gamma", "eta", "radius", "delta"]
    gammas, lines = curves["gamma"]
    expected = theory.escape_time(eta=0.05, gamma=gammas[300]).value
    assert lines["η = 0.05"][300] == pytest.approx(expected)
    assert np.isnan(lines["η = 0.05"][0]), "weak curvature has no bound"


def test_picture_refuses_bad_paths(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"expected \.png or \.svg"):
        theory.draw_escape(tmp_path / "a.pdf")
    with pytest.raises(UserError, match="does not exist"):
        theory.draw_escape(tmp_path / "none" / "a.png")


def test_importing_theory_does_not_import_matplotlib() -> None:
    code = "import sys, fedloom.theory; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_escape_round() -> None:
    curve = [0.10, 0.10, 0.11, 0.10, 0.13, 0.30, 0.55, 0.70, 0.80, 0.81]
    found = theory.escape_round(curve=curve)
    assert found.value == 6, "the mean of rounds 4 to 6 is 0.177, above 0.1 + 0.071; that of 3 to 5 is 0.113"
    assert theory.escape_round(curve=[1 - x for x in curve], higher_is_better=False).value == 6
    assert theory.escape_round(curve=curve, window=1).value == 6
    assert theory.escape_round(curve=curve, share=0.0).value == 3
    falling = theory.escape_round(curve=curve[::-1])
    assert np.isnan(falling.value)
    assert "no better" in falling.reason
    late = theory.escape_round(curve=[0, 0, 0, 1], share=0.5)
    assert np.isnan(late.value)
    assert "never rises enough" in late.reason
    with pytest.raises(UserError, match="window"):
        theory.escape_round(curve=[0.1, 0.2])
