"""Limits of FedMAP, its formulas by hand, Theorem 1 executed, and what it is refused on."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import fedloom as fl
from fedloom.plugins.map_prior.priors import Gaps, Gaussian, Prior, variance_root, weighted_median
from fedloom.spec.reducers import mean
from tests.helpers import bn_mlp, everything, federation, fit, gap, identical, mlp, mostly_slow, own, run_of, shared

DATA = federation((9, 14, 5, 8))
ENGINES = ("loop", "vectorised")


@pytest.mark.parametrize("omega", ["mean_loglik", "sum_loglik", "n"])
@pytest.mark.parametrize("model", [mlp(), bn_mlp()])
def test_no_prior_is_local_training_bit_for_bit(omega: str, model) -> None:  # type: ignore[no-untyped-def]
    alone = fit("local", model, DATA)
    flat = fit(fl.fedmap(sigma2=math.inf, omega=omega), model, DATA)
    for client in DATA:
        assert identical(own(alone, client.id), own(flat, client.id))
    wide = fit(f"fedmap(prior=laplace(b=inf), omega={omega!r})", model, DATA)
    for client in DATA:
        assert identical(own(alone, client.id), own(wide, client.id))


def test_without_a_prior_from_gamma_with_equal_weights_it_is_fedavg() -> None:
    for omega, weight in (("uniform", "uniform"), ("n", "n")):
        plain = fit(fl.fedavg(weight=weight), data=DATA, cohort=3)
        flat = fit(fl.fedmap(sigma2=math.inf, omega=omega, start="gamma"), data=DATA, cohort=3)
        assert identical(shared(plain), shared(flat))


def test_from_gamma_with_weights_by_rows_it_is_fedprox() -> None:
    prox = fit("fedprox(mu=0.5)", data=DATA, cohort=3)
    posterior = fit("fedmap(sigma2=2.0, omega='n', start='gamma')", data=DATA, cohort=3)
    assert gap(shared(prox), shared(posterior)) < 1e-12


def test_one_client_pulls_gamma_to_itself() -> None:
    result = fit("fedmap(1.0)", data=federation((9,)))
    assert gap(own(result, "0"), shared(result)) < 1e-12


def test_weights_by_hand() -> None:
    logs = [-1 - 0.5, -2 - 0.1]
    weigh = mean("omega", log=True).weights
    for shift in (0.0, -4096.0, 4096.0):  # a constant added to all of them changes nothing
        messages = [{"omega": {"weight": torch.tensor(v + shift, dtype=torch.float64)}} for v in logs]
        assert weigh(messages, [1, 1]) == pytest.approx([0.6457, 0.3543], abs=5e-5)
        assert weigh(messages, [1, 1]) == pytest.approx([1 / (1 + math.exp(-0.6)), 1 / (1 + math.exp(0.6))], abs=1e-12)


def test_the_weights_of_a_run_are_logarithms_in_float64() -> None:
    """A likelihood of 600 rows underflows as a number, in float32 and in float64, and does not here."""
    data = federation((600, 500), one_class=0)
    result = fit("fedmap(sigma2=5.0, omega='sum_loglik')", data=data, rounds=1, precision="fp32", epochs=1)
    assert torch.isfinite(shared(result)["0.weight"]).all()
    # Nearly all weight on the client whose sum of log-likelihoods is larger.
    ends = {c.id: own(result, c.id) for c in data}
    gaps = {c: gap(shared(result), ends[c]) for c in ends}
    assert min(gaps.values()) < 1e-5 < max(gaps.values())


quadratic = fl.Task(lambda out, y: 0.5 * 3.0 * (out[:, 0] - y) ** 2, primary="loss", higher_is_better=False)


def scalar(values: list[float], rows: list[int] | None = None) -> fl.Federation:
    """Clients with f(theta) = 3/2 (theta - b)^2, b given."""
    return fl.Federation.from_arrays(
        [
            ((np.ones((n, 1), np.float32), np.full(n, b, np.float32)),) * 2
            for b, n in zip(values, rows or [2] * len(values), strict=True)
        ]
    )


class One(nn.Module):
    def __init__(self, start: float = 0.5) -> None:
        super().__init__()
        self.theta = nn.Linear(1, 1, bias=False)
        nn.init.constant_(self.theta.weight, start)

    def forward(self, x: Tensor) -> Tensor:
        return self.theta(x)  # type: ignore[no-any-return]


def solve(
    method: str | fl.Method, data: fl.Federation, rounds: int = 1, start: float = 0.5, **more: object
) -> fl.Result:
    """Full-batch steps until the local problems are solved."""
    options = {"task": quadratic, "epochs": 300, "batch_size": "full", "optimizer": fl.sgd(lr=0.1)} | more
    return fit(method, One(start), data, rounds=rounds, **options)


def test_posterior_mode_of_a_quadratic() -> None:
    a, b, sigma2, gamma = 3.0, 2.0, 0.7, 0.5
    result = solve(fl.fedmap(sigma2=sigma2), scalar([b, -1.0]))
    expected = (a * b + gamma / sigma2) / (a + 1 / sigma2)
    assert float(own(result, "0")["theta.weight"]) == pytest.approx(expected, abs=1e-12)


def test_a_step_of_size_sigma2_is_the_weighted_mean() -> None:
    exact = fit("fedmap(sigma2=0.6)", data=DATA, cohort=3)
    step = fit("fedmap(sigma2=0.6, server_lr=0.6)", data=DATA, cohort=3)
    assert gap(shared(exact), shared(step)) < 1e-12


def test_a_prior_without_width_freezes_everything() -> None:
    """As sigma2 tends to 0 theta tends to gamma and nothing moves: it does not become FedAvg."""
    start = run_of(fit("local", data=DATA, rounds=1)).bound.start
    for sigma2, bound in ((1e-3, 1e-2), (1e-9, 1e-8)):
        result = fit(fl.fedmap(sigma2=sigma2, implicit=True), data=DATA, optimizer=fl.sgd(lr=0.1))
        assert all(torch.isfinite(v).all() for v in shared(result).values())
        assert gap(start, shared(result)) < bound
        for client in DATA:
            assert gap(start, own(result, client.id)) < bound


def test_implicit_and_explicit_steps_have_the_same_fixed_point() -> None:
    data = scalar([2.0, -1.0])
    explicit, implicit = (solve(fl.fedmap(sigma2=0.7, implicit=i), data, rounds=2, epochs=150) for i in (False, True))
    for client in data:
        assert gap(own(explicit, client.id), own(implicit, client.id)) < 1e-10


# Theorem 1 ------------------------------------------------------------------------------------------------


def envelope(
    gamma: Tensor, grams: list[Tensor], sides: list[Tensor], ends: list[Tensor], w: list[float], p: float
) -> Tensor:
    """``M(gamma) = sum_k w_k min_theta f_k(theta) + p/2 ||theta - gamma||^2`` of least squares, by its normal equations."""
    total = torch.zeros((), dtype=torch.float64)
    for g, s, e, weight in zip(grams, sides, ends, w, strict=True):
        theta = torch.linalg.solve(2 * g + p * torch.eye(len(gamma)).double(), 2 * s + p * gamma)
        total = total + weight * (theta @ g @ theta - 2 * s @ theta + e + p / 2 * (theta - gamma).square().sum())
    return total


@pytest.mark.parametrize("server_lr", [0.5])
def test_theorem_1_the_rounds_are_gradient_descent_on_the_envelope(server_lr: float) -> None:
    """``gamma_{t+1} = gamma_t - lambda grad M(gamma_t)``, the gradient by finite differences; fixed w_k, exact local minima."""
    draw = np.random.default_rng(1)
    clients, grams, sides, ends = [], [], [], []
    for n in (6, 9, 4):
        x = draw.normal(size=(n, 2)).astype(np.float32)
        y = (x @ draw.normal(size=2) + draw.normal(size=n)).astype(np.float32)
        clients.append(((x, y), (x, y)))
        wide = np.c_[x, np.ones(n)].astype(np.float64)
        grams.append(torch.from_numpy(wide.T @ wide / n))
        sides.append(torch.from_numpy(wide.T @ y.astype(np.float64) / n))
        ends.append(torch.tensor(float((y.astype(np.float64) ** 2).mean()), dtype=torch.float64))
    data, sigma2 = fl.Federation.from_arrays(clients), 0.8
    squares = fl.Task(lambda out, y: (out[:, 0] - y) ** 2, primary="loss", higher_is_better=False)
    model = nn.Linear(2, 1).double()
    before = torch.tensor([0.3, -0.7, -0.2], dtype=torch.float64)
    w = [6 / 19, 9 / 19, 4 / 19]
    for _ in range(2):
        with torch.no_grad():
            model.weight.copy_(before[:2])
            model.bias.copy_(before[2:])
        method = fl.fedmap(sigma2=sigma2, omega="n", server_lr=server_lr)
        options = {"task": squares, "epochs": 300, "batch_size": "full", "optimizer": fl.sgd(lr=0.2), "rounds": 1}
        leaves = shared(fit(method, model, data, **options))
        after = torch.cat([leaves["weight"].flatten(), leaves["bias"]])
        slope, h = torch.zeros(3).double(), 1e-5
        for i in range(3):
            step = torch.zeros(3).double()
            step[i] = h
            up, down = (envelope(before + s, grams, sides, ends, w, 1 / sigma2) for s in (step, -step))
            slope[i] = (up - down) / (2 * h)
        assert float(slope.norm()) > 1e-3
        assert torch.allclose(after, before - server_lr * slope, atol=1e-6)
        before = after


# Priors ---------------------------------------------------------------------------------------------------


def test_weighted_median_by_hand() -> None:
    values = torch.tensor([[0.0], [1.0], [5.0]])
    assert float(weighted_median(values, torch.tensor([0.2, 0.35, 0.45]))) == 1.0
    # The lower median at ties.
    assert float(weighted_median(torch.tensor([[3.0], [1.0]]), torch.tensor([0.5, 0.5]))) == 1.0


weights = st.lists(st.integers(1, 9), min_size=2, max_size=6)


@given(weights, st.data())
def test_weighted_median_minimises_the_weighted_sum_of_distances(w: list[int], data: st.DataObject) -> None:
    values = data.draw(st.lists(st.integers(-5, 5), min_size=len(w), max_size=len(w)))
    found = float(weighted_median(torch.tensor(values).double()[:, None], torch.tensor(w).double()))
    costs = [sum(x * abs(v - at) for x, v in zip(w, values, strict=True)) for at in values]
    assert sum(x * abs(v - found) for x, v in zip(w, values, strict=True)) == pytest.approx(min(costs))


@given(st.floats(0, 1e4), st.floats(1e-6, 1), st.floats(0.1, 5))
def test_variance_root(variance: float, eps: float, c: float) -> None:
    s = float(variance_root(torch.tensor([variance], dtype=torch.float64), eps, c))
    assert s >= 0
    assert 4 * eps * s * (s + c) ** 2 == pytest.approx(variance, rel=1e-9, abs=1e-12)


def test_student_t_with_infinite_freedom_is_the_gaussian_bit_for_bit() -> None:
    assert fl.student_t(nu=math.inf, tau2=0.6) == fl.gaussian(0.6)
    a, b = (fit(m, data=DATA) for m in ("fedmap(prior=student_t(nu=inf, tau2=0.6))", "fedmap(sigma2=0.6)"))
    assert identical(shared(a), shared(b))
    near = fl.student_t(nu=1e7, tau2=0.6).penalty(torch.tensor([0.3, -2.0]).double(), 1.0)
    assert float(near) == pytest.approx(
        float(fl.gaussian(0.6).penalty(torch.tensor([0.3, -2.0]).double(), 1 / 0.6)), rel=1e-5
    )


@pytest.mark.parametrize(
    "prior", [fl.gaussian(0.7), fl.laplace(0.7), fl.student_t(2.0, 0.3), fl.learnable_gaussian(0.01)]
)
def test_slopes_are_gradients_of_penalties(prior: Prior) -> None:
    """The server's slope is the derivative of ``sum_k w_k R(theta_k, gamma)``, by automatic differentiation."""
    draw = torch.Generator().manual_seed(0)
    theta = torch.randn(4, 3, generator=draw, dtype=torch.float64)
    w = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    gamma = torch.randn(3, generator=draw, dtype=torch.float64)
    learnt = torch.rand(3, generator=draw, dtype=torch.float64) if prior.needs == "moments" else None
    d = theta - gamma
    gaps = Gaps(mean=w @ d, square=w @ d**2, each=d, weights=w)
    move = torch.full((3,), 0.05, dtype=torch.float64, requires_grad=True)
    s = None if learnt is None else learnt.clone().requires_grad_()
    total = sum(w[k] * prior.penalty(theta[k] - gamma - move, prior.scale(), s) for k in range(4))
    if s is not None:
        total = total + prior.eps * ((gamma + move).square().sum() + s.square().sum())
    down, wide = prior.slope(gaps, gamma, move.detach(), prior.scale(), learnt)
    found = torch.autograd.grad(total, [move] if s is None else [move, s])
    assert torch.allclose(found[0], down, atol=1e-12)
    if s is not None:
        assert torch.allclose(found[1], wide, atol=1e-12)
    if not isinstance(prior, type(fl.laplace())):
        at, learnt = prior.minimise(gaps, gamma, prior.scale(), learnt)
        down, wide = prior.slope(gaps, gamma, at, prior.scale(), learnt)
        assert float(down.abs().max()) < 1e-10
        assert wide is None or float(wide.abs().max()) < 1e-10


@pytest.mark.parametrize("prior", [fl.gaussian(0.7), fl.laplace(0.7), fl.learnable_gaussian(0.01)])
def test_implicit_steps_minimise(prior: Prior) -> None:
    gap_, eta = torch.tensor([-2.0, 0.05, 0.9], dtype=torch.float64), 0.3
    learnt = torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64)
    found = prior.near(gap_, prior.scale(), eta, learnt)

    def cost(d: Tensor) -> float:
        return float(eta * prior.penalty(d, prior.scale(), learnt) + 0.5 * ((d - gap_) ** 2).sum())

    for i in range(3):
        for h in (1e-3, -1e-3):
            step = torch.zeros(3).double()
            step[i] = h
            assert cost(found + step) > cost(found)


def test_precision_patterns() -> None:
    prior = fl.gaussian(2.0, {"head": 0.5})
    assert isinstance(prior, Gaussian)
    assert prior.scale() == 0.5
    with pytest.raises(fl.UserError, match="matches no leaf"):
        fit(fl.fedmap(prior=fl.gaussian(precision={"nowhere.*": 1.0})), data=DATA)


# Composition ----------------------------------------------------------------------------------------------


def test_on_fedrep_the_body_is_mirrored_and_the_head_personal() -> None:
    result = fit("fedrep + map_prior(sigma2=1.0)", data=DATA)
    kinds = {n: s.kind for n, s in run_of(result).bound.specs.items()}
    assert kinds == {"0.weight": "mirrored", "0.bias": "mirrored", "2.weight": "personal", "2.bias": "personal"}
    flat = fit("fedrep + map_prior(sigma2=inf)", data=DATA)
    assert not identical(own(result, "0"), own(flat, "0"))


def test_buffers_stay_and_adapters_are_left_alone() -> None:
    result = fit("fedmap(1.0) + isr(points=1)", bn_mlp(), DATA)
    specs = run_of(result).bound.specs
    assert {s.kind for s in specs.values() if s.buffer} == {"personal"}
    assert {s.kind for s in specs.values() if s.owner} == {"shared"}
    assert {s.kind for s in specs.values() if not s.owner and not s.buffer} == {"mirrored"}


REFUSED = {
    *("fedaf", "fedala", "fedas", "fedavg_then_local", "fedcac", "feddyn", "fedexp", "fedgau", "fedlag", "fedmap"),
    *("fednova", "fedpac", "fedproto", "local", "local_full", "pfedme", "qfedavg", "scaffold"),
}
"""Methods that define weights of their own or what clients start from, or share nothing that they train."""


KEPT = ("fedaims", "fedavg", "fedrep", "fedavgm", "ditto", "omniisr")


@pytest.mark.parametrize("method", mostly_slow(sorted(set(fl.list_methods()) - REFUSED), KEPT))
def test_on_every_method_that_leaves_weights_and_start_open(method: str) -> None:
    a, b = (fit(f"{method} + map_prior(0.5)", data=DATA, rounds=2, epochs=1, cohort=3, engine=e) for e in ENGINES)
    left, right = everything(a), everything(b)
    assert gap(left, right) < 1e-10
    flat = fit(f"{method} + map_prior(inf)", data=DATA, rounds=2, epochs=1, cohort=3)
    assert gap(everything(flat), left) > 1e-6, "the prior must reach the training"


@pytest.mark.parametrize("method", sorted(REFUSED))
def test_refused_methods(method: str) -> None:
    with pytest.raises(fl.Conflict, match="map_prior"):
        fit(f"{method} + map_prior(0.5)", data=DATA, rounds=1)


@pytest.mark.parametrize(
    "text",
    [
        "fedmap + lag",
        "fedlag + map_prior",
        "fedavg + lag(k=0) + map_prior",
        "scaffold + map_prior",
        "fedmap + control_variates",
        "fedmap + map_prior",
        "local + map_prior",
        "fedproto + map_prior",
    ],
)
def test_refused(text: str) -> None:
    with pytest.raises(fl.Conflict, match=r"map_prior|lag|control_variates"):
        fl.method(text)


@pytest.mark.parametrize(
    "arguments",
    [
        {"sigma2": 0.0},
        {"sigma2": -1.0},
        {"omega": "rows"},
        {"start": "mean"},
        {"server_lr": 0.0},
        {"server_steps": 0},
        {"prior": "cauchy"},
        {"prior": fl.student_t(), "implicit": True},
    ],
)
def test_ranges(arguments: dict[str, object]) -> None:
    with pytest.raises(fl.UserError):
        fl.fedmap(**arguments)  # type: ignore[arg-type]


def test_text_form() -> None:
    text = "fedmap(prior=gaussian(sigma2=2.0, precision={'head': 0.1}))"
    assert fl.method(text).text == text
    with pytest.raises(fl.UserError, match="laplace"):
        fl.method("fedmap(prior=laplace(width=3))")
