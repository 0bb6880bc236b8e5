"""Rounds to eps, ISR's ratio, and Table II."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fedloom import theory

sizes = st.floats(0.05, 20.0)


def test_centralised_rounds_by_hand() -> None:
    case = {"eps": 0.8, "gap": 1.0, "smoothness": 2.0, "second_moment": 3.0}
    assert theory.rounds_cl(**case, eta=1.0).value == pytest.approx(100)
    assert theory.rounds_cl(**case).value == pytest.approx(8 * 1 * 2 * 3 / 0.64)
    assert theory.rounds_cl(**{**case, "eps": 0.4}).value == pytest.approx(4 * theory.rounds_cl(**case).value)


def test_federated_rounds_by_hand() -> None:
    case = {"gap": 1.0, "smoothness": 2.0, "second_moment": 3.0, "steps": 2, "heterogeneity": 0.5, "eps": 0.4}
    assert theory.rounds_fl(**case).value == pytest.approx(8 * 2 * (3 + 4 * 0.5) / 0.16)
    assert theory.rounds_fl(**case, mode="sound").value == pytest.approx(8 * 2 * (3 + 4 * (0.5 + 0.4)) / 0.16)
    fixed = (2 + 2 * (3 + 2)) / 0.4
    assert theory.rounds_fl(**case, eta=1.0).value == pytest.approx(fixed**2)
    assert theory.rounds_fl(**case, eta=1.0, mode="sound").value == pytest.approx((fixed + 2 * 4) ** 2)
    assert not theory.rounds_fl(**case).claims[0].holds


@given(
    eps=st.floats(0.01, 2), gap=sizes, moment=sizes, steps=st.integers(1, 20), h=sizes, c=sizes,
    eta=st.none() | st.floats(0.01, 5),
)  # fmt: skip
def test_sound_federated_rounds_turn_the_bound_round(
    eps: float, gap: float, moment: float, steps: int, h: float, c: float, eta: float | None
) -> None:
    case = {
        "gap": gap,
        "smoothness": 1.5,
        "second_moment": moment,
        "steps": steps,
        "heterogeneity": h,
        "c": c,
    }
    paper, sound = (theory.rounds_fl(**case, eps=eps, eta=eta, mode=m) for m in ("paper", "sound"))
    assert paper.value <= sound.value
    assert sound.value >= theory.rounds_cl(eps=eps, gap=gap, smoothness=1.5, second_moment=moment).value
    assume(sound.value >= 1)
    back = theory.fl_bound(**case, eta=sound.terms["eta"], rounds=sound.value)
    assert back.value == pytest.approx(eps, rel=1e-6)


def test_isr_ratio_limits() -> None:
    case = {"kappa": 0.3, "steps": 5}
    assert theory.isr_ratio(**case, second_moment=0.0, heterogeneity=2.0).value == pytest.approx(0.3)
    assert theory.isr_ratio(**case, second_moment=2.0, heterogeneity=0.0).value == 1.0
    assert theory.isr_ratio(**case, second_moment=2.0, heterogeneity=1.0).value == pytest.approx(9.5 / 27)
    fair = theory.isr_ratio(
        **case, second_moment=20.0, heterogeneity=1.0, second_moment_plain=2.0, smoothness_ratio=1.5
    )
    assert fair.value == pytest.approx(1.5 * 27.5 / 27)
    assert not fair.claims[0].holds
    empty = theory.isr_ratio(**case, second_moment=0.0, heterogeneity=0.0)
    assert np.isnan(empty.value)
    assert empty.reason


@given(kappa=st.floats(0, 1), moment=sizes, steps=st.integers(1, 50), h=sizes)
def test_isr_ratio_lies_between_kappa_and_one(kappa: float, moment: float, steps: int, h: float) -> None:
    ratio = theory.isr_ratio(kappa=kappa, second_moment=moment, steps=steps, heterogeneity=h).value
    assert kappa * (1 - 1e-12) <= ratio <= 1 + 1e-12
    rounds = [
        theory.rounds_fl(eps=0.1, gap=1.0, smoothness=1.0, second_moment=moment, steps=steps, heterogeneity=k * h).value
        for k in (kappa, 1.0)
    ]
    assert ratio == pytest.approx(rounds[0] / rounds[1])


def test_table_two() -> None:
    numbers = {
        "gap": 1.0, "eta": 1.0, "rounds": 100, "eps": 0.5, "smoothness": 2.0, "second_moment": 3.0,
        "steps": 1, "heterogeneity": 1.0, "alpha_min": 0.5, "noise": 1.0, "bias": 0.1,
    }  # fmt: skip
    sound, paper = theory.compare_modes(**numbers), theory.compare_modes(**numbers, mode="paper")
    assert [row.mode for row in sound] == ["centralised", "federated", "hybrid"]
    assert [row.bound.value for row in sound] == pytest.approx([0.8, 1.25, 0.31])
    assert [row.rounds.value for row in sound] == pytest.approx([192, 16 * 4.5 / 0.25, 8 / 0.49**2])
    assert [row.holds for row in sound] == [True, True, True]
    assert [row.bound.value for row in paper] == pytest.approx([0.8, np.inf, 0.31])
    assert [row.rounds.value for row in paper] == pytest.approx([192, 256, 16 / 0.49**2])
    assert [row.holds for row in paper] == [True, False, True]
    assert "sqrt(T) c K^2" in paper[1].condition
    assert "a_min^2" in paper[2].rate
    assert "a_min^2" not in sound[2].rate
