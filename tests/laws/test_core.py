"""Laws of the core methods: limits bit for bit, closed forms, invariants."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fedloom as fl
from tests.helpers import bn_mlp, everything, federation, fit, gap, identical, mlp, own, run_of, shared

DATA = federation((9, 14, 5, 8))


class Point(nn.Module):
    """A model that is a point: its output is its parameter, whatever the input."""

    def __init__(self, start: float = 0.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([start]))

    def forward(self, x: Tensor) -> Tensor:
        return self.w.expand(x.shape[0], 1)


QUADRATIC = fl.Task(lambda out, y: 0.5 * (out[:, 0] - y) ** 2, primary="loss")
"""``f_k(w) = mean_i (w - y_i)^2 / 2``: every step has a closed form."""


def points(*targets: tuple[float, int]) -> fl.Federation:
    """Clients whose rows all have one target: ``(target, rows)``."""
    return fl.Federation.from_arrays(
        [((np.zeros((n, 1), np.float32), np.full(n, t, np.float32)),) * 2 for t, n in targets]
    )


def descend(method: str | fl.Method, data: fl.Federation, start: float = 0.0, **options: object) -> fl.Result:
    options = {"rounds": 1, "epochs": 1, "batch_size": "full", "optimizer": fl.sgd(1.0), "task": QUADRATIC} | options
    return fit(method, lambda: Point(start), data, **options)


# Closed forms ---------------------------------------------------------------------------------------------


def test_fedavg_weighs_by_rows() -> None:
    assert float(shared(descend("fedavg", points((0.0, 1), (4.0, 3))))["w"]) == 3.0
    assert float(shared(descend("fedavg(weight='uniform')", points((0.0, 1), (4.0, 3))))["w"]) == 2.0


@pytest.mark.parametrize("start", [2.0, -3.0])
def test_fedprox_closed_form(start: float) -> None:
    lr, mu, steps, target = 0.1, 0.5, 7, 1.0
    result = descend(f"fedprox(mu={mu})", points((target, 4)), start, epochs=steps, optimizer=fl.sgd(lr))
    fixed = (target + mu * start) / (1 + mu)
    expected = fixed + (1 - lr * (1 + mu)) ** steps * (start - fixed)
    assert float(shared(result)["w"]) == pytest.approx(expected, abs=1e-15)


def test_proximal_gradient_enters_before_momentum() -> None:
    lr, mu, beta, w, y = 0.1, 0.5, 0.9, 2.0, 1.0
    result = descend(f"fedprox(mu={mu})", points((y, 3)), w, epochs=4, optimizer=fl.sgd(lr, momentum=beta))
    theta, v = w, 0.0
    for _ in range(4):
        v = beta * v + (theta - y) + mu * (theta - w)
        theta -= lr * v
    assert float(shared(result)["w"]) == pytest.approx(theta, abs=1e-14)


def test_ditto_closed_form() -> None:
    lr, lam, steps = 0.1, 0.3, 5
    result = descend(f"ditto(lam={lam})", points((1.0, 2), (-2.0, 2)), 0.5, epochs=steps, optimizer=fl.sgd(lr))
    for name, target in (("0", 1.0), ("1", -2.0)):
        fixed = (target + lam * 0.5) / (1 + lam)
        expected = fixed + (1 - lr * (1 + lam)) ** steps * (0.5 - fixed)
        assert float(own(result, name)["own/w"]) == pytest.approx(expected, abs=1e-14)


def test_clip_makes_the_norm_the_bound_and_is_idempotent() -> None:
    data = points((3.0, 1))
    assert float(shared(descend("fedavg + clip(0.5)", data))["w"]) == pytest.approx(0.5, abs=1e-15)
    once, twice = (shared(descend(m, data))["w"] for m in ("fedavg + clip(0.5)", "fedavg + clip(0.5) + clip(0.5)"))
    assert torch.equal(once, twice)
    assert identical(shared(descend("fedavg", data)), shared(descend("fedavg + clip(100.0)", data)))


def test_noise_has_its_standard_deviation() -> None:
    make = lambda: nn.Sequential(nn.Linear(200, 50, bias=False))  # noqa: E731
    data = fl.Federation.from_arrays([((np.zeros((2, 200), np.float32), np.array([0, 1])), None)])
    noisy, plain = (shared(fit(m, make, data, rounds=1))["0.weight"] for m in ("fedavg + noise(0.3)", "fedavg"))
    gap_ = noisy - plain
    assert float(gap_.std()) == pytest.approx(0.3, rel=0.03)
    assert abs(float(gap_.mean())) < 0.02


# Limits, bit for bit --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "base"),
    [
        ("fedprox(mu=0)", "fedavg"),
        ("fedprox(mu=0.0)", "fedavg"),
        ("fedavg + noise(0.0)", "fedavg"),
        ("fedavg + personal('head')", "fedper"),
        ("fedavg + proximal(0.3)", "fedprox(mu=0.3)"),
        ("fedavg + control_variates", "scaffold"),
    ],
)
@pytest.mark.parametrize("make", [mlp(), bn_mlp()])
def test_limit(limit: str, base: str, make: object) -> None:
    a, b = (fit(m, make, DATA, cohort=2, optimizer=fl.sgd(0.1, momentum=0.5)) for m in (limit, base))
    left, right = everything(a), everything(b)
    assert set(left) == set(right)
    assert identical(left, right)


def test_fedbn_without_batch_norm_is_fedavg_with_a_warning() -> None:
    assert identical(shared(fit("fedavg", mlp(), DATA)), shared(fit("fedbn", mlp(), DATA)))
    with pytest.warns(UserWarning, match="matches no leaf"):
        fl.fit("fedbn", mlp(), DATA, rounds=1, progress=False)


def test_fedbn_server_never_moves_batch_norm() -> None:
    result = fit("fedbn", bn_mlp(), DATA)
    start = run_of(result).bound.start
    for name in ("1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked"):
        assert torch.equal(shared(result)[name], start[name])


def test_ditto_shares_fedavg() -> None:
    a, b = fit("fedavg", bn_mlp(), DATA, cohort=2), fit("ditto", bn_mlp(), DATA, cohort=2)
    names = run_of(a).bound.specs
    assert identical({n: shared(a)[n] for n in names}, {n: shared(b)[n] for n in names})


def test_ditto_without_pull_is_local_training() -> None:
    a, b = fit("ditto(lam=0)", mlp(), DATA, cohort=2), fit("local(stream='own')", mlp(), DATA, cohort=2)
    for client in DATA:
        left, right = own(a, client.id), own(b, client.id)
        assert all(torch.equal(left[f"own/{k}"], v) for k, v in right.items())


def test_one_client_is_plain_training() -> None:
    data = federation((12,))
    lone, avg, per = (own(fit(m, mlp(), data), "0") for m in ("local", "fedavg", "fedper"))
    assert gap(lone, avg) < 1e-14
    assert gap(lone, per) < 1e-14
    assert gap(lone, own(fit("scaffold", mlp(), data), "0")) < 1e-12


def test_local_does_not_depend_on_others() -> None:
    full = fit("local", mlp(), DATA)
    part = fit("local", mlp(), DATA.subset(["1", "3"]))
    for name in ("1", "3"):
        assert identical(own(full, name), own(part, name))


def test_full_batch_step_is_the_centralised_one() -> None:
    options = {"rounds": 1, "epochs": 1, "batch_size": "full"}
    a, b = (fit("fedavg", mlp(), DATA, mode=m, **options) for m in ("federated", "centralised"))
    assert gap(shared(a), shared(b)) < 1e-12


# SCAFFOLD -------------------------------------------------------------------------------------------------


def test_scaffold_control_is_the_mean_of_the_clients() -> None:
    result = fit("scaffold", mlp(), DATA, rounds=4)
    run = run_of(result)
    for name, c in run.state.memory["control_variates"].items():
        mean = torch.stack([s.memory["control_variates"][name] for s in run.clients.values()]).mean(0)
        torch.testing.assert_close(c, mean, rtol=1e-12, atol=1e-14)


def test_scaffold_control_of_one_step_is_the_gradient() -> None:
    result = descend("scaffold", points((1.0, 2), (-3.0, 2)), 0.25, optimizer=fl.sgd(0.1))
    for name, target in (("0", 1.0), ("1", -3.0)):
        c = run_of(result).clients[name].memory["control_variates"]["w"]
        assert float(c) == pytest.approx(0.25 - target, abs=1e-14)


def test_scaffold_with_momentum_is_marked() -> None:
    with pytest.warns(UserWarning, match="off_spec"):
        result = fl.fit("scaffold", mlp(), DATA, rounds=1, optimizer=fl.sgd(0.1, momentum=0.9), progress=False)
    assert "off_spec" in str(result.summary())


# FedRep ---------------------------------------------------------------------------------------------------


def test_fedrep_without_head_epochs_keeps_the_initial_head() -> None:
    result = fit("fedrep(head_epochs=0)", bn_mlp(), DATA)
    start = run_of(result).bound.start
    for state in run_of(result).clients.values():
        assert identical(state.leaves, start)


def test_personal_leaves_of_clients_left_out_do_not_move() -> None:
    result = fit("fedper", mlp(), DATA, rounds=1, cohort=1)
    (took,) = result.history[0]["clients"]
    assert set(run_of(result).clients) == {took}
    start = run_of(result).bound.start
    for client in DATA:
        if client.id != took:
            assert torch.equal(own(result, client.id)["2.weight"], start["2.weight"])


# Composition ----------------------------------------------------------------------------------------------

STACKS = ["proximal(0.1)", "clip(0.5)", "noise(0.01)", "personal('0.weight')"]


@pytest.mark.parametrize("base", ["local", "fedavg", "fedprox", "scaffold", "fedper", "fedrep", "ditto", "fedbn"])
def test_everything_stacks(base: str) -> None:
    text = " + ".join([base, *STACKS])
    result = fit(text, bn_mlp(), DATA, rounds=2, cohort=3)
    assert result.config["method"].startswith(base)
    assert all(np.isfinite(r["loss"]) for r in result.history)


@given(st.permutations(["proximal(0.1)", "proximal(0.4)", "control_variates"]))
@settings(max_examples=6)
def test_terms_commute_to_rounding(order: list[str]) -> None:
    reference = fit("fedavg + proximal(0.1) + proximal(0.4) + control_variates", mlp(), DATA, rounds=2)
    result = fit(" + ".join(["fedavg", *order]), mlp(), DATA, rounds=2)
    assert gap(shared(reference), shared(result)) < 1e-12


def test_sum_of_proximal_terms_is_one_with_the_sum() -> None:
    a, b = fit("fedavg + proximal(0.1) + proximal(0.2)", mlp(), DATA), fit("fedprox(mu=0.3)", mlp(), DATA)
    assert gap(shared(a), shared(b)) < 1e-12


def test_uploads_do_not_commute() -> None:
    with pytest.raises(fl.Conflict, match="must follow"):
        fl.method("fedavg + noise(0.1) + clip(1.0)")


# Randomness -----------------------------------------------------------------------------------------------


def test_no_global_generator_is_moved() -> None:
    before, numpy_before = torch.random.get_rng_state(), np.random.get_state()[1].copy()  # type: ignore[index, union-attr]
    fit("ditto + noise(0.1)", mlp(), DATA)
    assert torch.equal(before, torch.random.get_rng_state())
    assert (numpy_before == np.random.get_state()[1]).all()  # type: ignore[index]


def test_seeds_matter_and_repeat() -> None:
    a, b, c = (fit("fedavg", mlp(), DATA, cohort=2, seed=s) for s in (0, 0, 1))
    assert identical(everything(a), everything(b))
    assert not identical(shared(a), shared(c))


def test_module_is_not_changed_and_is_the_start() -> None:
    module = mlp()().double()
    before = {k: v.clone() for k, v in module.state_dict().items()}
    result = fit("fedavg", module, DATA)
    assert identical(before, dict(module.state_dict()))
    assert identical(before, run_of(result).bound.start)
