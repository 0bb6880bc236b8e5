"""Limits and hand-checkable cases of pFedMe, APFL and FedALA."""

from __future__ import annotations

import pytest
import torch

from tests.helpers import bn_mlp, federation, fit, identical, mlp, own, run_of, shared
from tests.laws.personal import parabola, value


def test_pfedme_by_hand() -> None:
    # The inner problem is (theta - 1)^2/2 + 15 theta^2/2: one step of 1/16 solves it. Then w' = eta lam theta.
    result = parabola(f"pfedme(lam=15, K=1, R=1, eta=0.01, eta_p={1 / 16})", start=0.0, target=1.0)
    assert value(own(result, "0"), "own/0.weight") == pytest.approx(1 / 16, abs=1e-15)
    assert value(shared(result)) == pytest.approx(0.9375 * 0.01, abs=1e-15)


def test_pfedme_keeps_the_model_of_the_last_participation() -> None:
    result = fit("pfedme(eta=0.05)", data=federation((9, 14, 5, 8)), rounds=1, cohort=2)
    asked = result.history[0]["clients"]
    for name in run_of(result).sites:
        start = {f"own/{k}": v for k, v in run_of(result).bound.start.items() if "/" not in k}
        assert identical(start, own(result, name)) is (name not in asked)


@pytest.mark.parametrize(("w", "v_then", "a_then"), [(2.0, 0.0, 0.5), (4.0, -0.05, 0.9)])
def test_apfl_by_hand(w: float, v_then: float, a_then: float) -> None:
    # v starts where w does, so a first round that moves only w to its place would disturb v: set v by hand.
    result = parabola("apfl(alpha=0.5)", start=w, target=1.0, rounds=1)
    run = run_of(result)
    run.clients["0"].leaves["own/0.weight"] = torch.zeros(1, 1, dtype=torch.float64)
    run.clients["0"].leaves["own/apfl:a"] = torch.tensor(0.5, dtype=torch.float64)
    run.state.leaves["0.weight"] = torch.full((1, 1), w, dtype=torch.float64)
    run.play(["0"], 2)
    state = run.clients["0"].leaves
    assert value(state, "own/0.weight") == pytest.approx(v_then, abs=1e-15)
    assert value(state, "own/apfl:a") == pytest.approx(a_then, abs=1e-15)


@pytest.mark.parametrize("model", [mlp(), bn_mlp()])
def test_apfl_limits(model: object) -> None:
    plain = fit("fedavg", model, cohort=2)
    zero = fit("apfl(alpha=0, adaptive=False)", model, cohort=2)
    assert identical(shared(plain), shared(zero))
    assert [r["accuracy"] for r in plain.history] == [r["accuracy"] for r in zero.history]
    assert [r["loss"] for r in plain.history] == [r["loss"] for r in zero.history]
    one = fit("apfl(alpha=1, adaptive=False)", model, cohort=2)
    alone = fit("local(stream='own')", model, cohort=2)
    for name in run_of(alone).sites:
        found = own(one, name)
        assert identical(own(alone, name), {k: found[f"own/{k}"] for k in own(alone, name)})
    assert [r["loss"] for r in one.history] == [r["loss"] for r in alone.history]
    assert identical(shared(plain), {k: shared(fit("apfl", model, cohort=2))[k] for k in shared(plain)})


@pytest.mark.parametrize("model", [mlp(), bn_mlp()])
def test_fedala_without_steps_is_fedavg(model: object) -> None:
    plain, zero = fit("fedavg", model, cohort=2), fit("fedala(eta_w=0)", model, cohort=2)
    assert identical(shared(plain), shared(zero))
    assert [r["loss"] for r in plain.history] == [r["loss"] for r in zero.history]


def test_fedala_by_hand() -> None:
    # old 0, received 1, gradient 2 (f = (w + 1)^2/2 at 1), W = 1: W = 1 - 0.1 * 2 * 1 = 0.8 and theta = 0.8.
    result = parabola("fedala(share=1, eta_w=0.1)", start=1.0, target=-1.0)
    run = run_of(result)
    memory = run.clients["0"].memory["fedala"]
    memory |= {"0.weight": torch.zeros(1, 1, dtype=torch.float64), "learnt": torch.ones((), dtype=torch.float64)}
    run.state.leaves["0.weight"] = torch.ones(1, 1, dtype=torch.float64)
    found = own(result, "0")
    assert value(found, "fedala:0.weight") == pytest.approx(0.8, abs=1e-15)
    assert value(found) == pytest.approx(0.8, abs=1e-15)


def test_fedala_with_no_weight_keeps_the_old_head() -> None:
    result = fit("fedala(eta_w=0)", rounds=2)
    run = run_of(result)
    for state in run.clients.values():
        for name in ("2.weight", "2.bias"):
            state.leaves[f"fedala:{name}"] = torch.zeros_like(state.leaves[f"fedala:{name}"])
    for name, state in run.clients.items():
        found, old = own(result, name), state.memory["fedala"]
        assert all(torch.equal(found[k], old[k]) for k in ("2.weight", "2.bias"))
        assert all(torch.equal(found[k], run.state.leaves[k]) for k in ("0.weight", "0.bias"))


def test_fedala_skips_the_first_round() -> None:
    plain, one = fit("fedavg", rounds=1), fit("fedala", rounds=1)
    assert identical(shared(plain), shared(one))
