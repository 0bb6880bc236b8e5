"""Limits and hand-checkable cases of FedPAC and FedCAC, and the quadratic program on the simplex."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import nnls

from fedloom.methods.fedcac import critical, overlaps, partners
from fedloom.methods.fedpac import head_weights
from fedloom.ops.simplex import minimise, project
from tests.helpers import bn_mlp, federation, fit, identical, mlp, own, run_of, shared


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), size=st.integers(1, 12), rank=st.integers(1, 12), floor=st.floats(1e-4, 1.0))
def test_minimise_agrees_with_non_negative_least_squares(seed: int, size: int, rank: int, floor: float) -> None:
    # With P = B^T B and a large weight on 1^T a = 1, nnls solves the same problem.
    draw = np.random.default_rng(seed)
    B = np.vstack([draw.normal(size=(rank, size)), np.sqrt(floor) * np.eye(size)])
    a = minimise(torch.from_numpy(B.T @ B)[None])[0].numpy()
    heavy = 1e4
    other, _ = nnls(np.vstack([B, heavy * np.ones((1, size))]), np.r_[np.zeros(len(B)), heavy], maxiter=1000)
    other /= other.sum()
    assert a.min() >= 0
    assert a.sum() == pytest.approx(1, abs=1e-12)
    value = float(np.sum((B @ a) ** 2))
    assert value <= float(np.sum((B @ other) ** 2)) * (1 + 1e-9) + 1e-12
    # First-order optimality: no corner has a smaller directional derivative than the point itself.
    slope = B.T @ (B @ a)
    assert slope.min() >= value - 1e-8 * max(1.0, value)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(-5, 5), min_size=1, max_size=8))
def test_projection_is_the_nearest_point(values: list[float]) -> None:
    v = torch.tensor([values], dtype=torch.float64)
    p = project(v)
    assert float(p.sum()) == pytest.approx(1, abs=1e-12)
    assert float(p.min()) >= 0
    for corner in torch.eye(len(values), dtype=torch.float64):
        assert float(((v - p) * (corner - p)).sum()) <= 1e-9


def test_a_client_without_variance_keeps_to_itself() -> None:
    h = torch.tensor([[[0.0]], [[1.0]], [[2.0]]])
    a = head_weights(h, torch.tensor([0.0, 1.0, 1.0]))
    assert torch.equal(a[0], torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64))


def test_fedpac_weights_by_hand() -> None:
    h = torch.ones(2, 3, 4)
    assert torch.allclose(head_weights(h, torch.tensor([1.0, 3.0])), torch.tensor([[0.75, 0.25]] * 2).double())


def test_fedpac_drops_small_weights() -> None:
    a = head_weights(torch.zeros(2, 1, 1), torch.tensor([1.0, 5000.0]))
    assert torch.equal(a, torch.tensor([[1.0, 0.0]] * 2, dtype=torch.float64))


@pytest.mark.parametrize("model", [mlp(), bn_mlp()])
def test_fedpac_in_its_first_round_has_fedreps_body(model: object) -> None:
    # No centroids yet, so no pull; the head phase is FedRep's.
    pac, rep = fit("fedpac", model, rounds=1), fit("fedrep(head_epochs=1)", model, rounds=1)
    body = {k: v for k, v in shared(rep).items() if run_of(rep).bound.specs[k].kind == "shared"}
    assert identical(body, shared(pac))


def test_fedpac_combined_heads_reach_their_client_only() -> None:
    result = fit("fedpac", data=federation((9, 14, 5, 8)), rounds=1, cohort=2)
    run = run_of(result)
    for name in run.sites:
        found = own(result, name)
        sampled = name in result.history[0]["clients"]
        same = all(torch.equal(found[k], run.bound.start[k]) for k in ("2.weight", "2.bias"))
        # Clients that were not asked hold the server's mean head, which is what a new client would get.
        assert not same
        if not sampled:
            assert all(torch.equal(found[k], run.state.leaves[k]) for k in ("2.weight", "2.bias"))


def test_fedcac_overlap_by_hand() -> None:
    masks = {
        "a": torch.tensor([[1, 1], [1, 0]], dtype=torch.uint8),
        "b": torch.tensor([[0, 0], [1, 0]], dtype=torch.uint8),
    }
    assert overlaps(masks)[0, 1] == 0.5
    assert torch.equal(overlaps(masks).diagonal(), torch.ones(2, dtype=torch.float64))


def test_fedcac_critical_elements_by_hand() -> None:
    new, old = torch.tensor([1.0, 2.0, -3.0, 4.0]), torch.tensor([0.0, 2.0, -2.0, 4.5])
    assert critical(new, old, 0.5).tolist() == [0, 0, 1, 1]
    assert critical(new, old, 0.2).tolist() == [0, 0, 0, 0]
    assert critical(torch.zeros(4), torch.zeros(4), 0.5).tolist() == [1, 1, 0, 0]


def test_fedcac_nobody_joins_after_beta_rounds() -> None:
    overlap = torch.tensor([[1.0, 0.6, 0.2], [0.6, 1.0, 0.4], [0.2, 0.4, 1.0]], dtype=torch.float64)
    assert torch.equal(partners(overlap, 1.5), torch.eye(3, dtype=torch.float64))
    assert torch.equal(partners(overlap, 1.0)[0], torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64))
    assert torch.equal(partners(torch.ones(1, 1, dtype=torch.float64), 0.1), torch.ones(1, 1, dtype=torch.float64))


@pytest.mark.parametrize("model", [mlp(), bn_mlp()])
def test_fedcac_limits(model: object) -> None:
    assert identical(shared(fit("fedavg", model, cohort=2)), shared(fit("fedcac(tau=0)", model, cohort=2)))


def test_fedcac_with_everything_critical_is_the_plain_mean() -> None:
    plain, all_critical = fit("fedavg('uniform')"), fit("fedcac(tau=1)")
    for name in run_of(plain).sites:
        found = own(all_critical, name)
        assert all(torch.allclose(v, found[k], atol=1e-12) for k, v in shared(plain).items())
