"""Limits and hand-checkable cases of FedRoD, FedDBE and GPFL."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedloom as fl
from fedloom.methods.feddbe import mean_gap
from fedloom.methods.fedrod import balanced_loss
from fedloom.methods.gpfl import conditioned
from fedloom.tasks.batch import Batch
from tests.helpers import bn_mlp, federation, fit, identical, mlp, own, run_of, shared


def test_balanced_loss_by_hand() -> None:
    batch = Batch(torch.zeros(1, 1), torch.tensor([1]))
    loss = balanced_loss(torch.zeros(1, 2, dtype=torch.float64), batch, torch.tensor([3.0, 1.0]))
    assert float(loss) == pytest.approx(math.log(4), abs=1e-12)


def test_balanced_loss_of_equal_counts_is_cross_entropy() -> None:
    logits = torch.randn(6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = torch.tensor([0, 1, 2, 2, 1, 0])
    loss = balanced_loss(logits, Batch(logits, y), torch.full((3,), 7.0))
    assert float(loss) == pytest.approx(float(F.cross_entropy(logits, y)), abs=1e-12)


def test_fedrod_with_a_class_that_is_absent() -> None:
    result = fit("fedrod", data=federation((9, 8, 5), one_class=1))
    assert all(torch.isfinite(v).all() for v in shared(result).values())


def test_fedrod_starts_from_the_generic_prediction() -> None:
    data = federation((9, 14, 5, 8))
    result = fit("fedrod", data=data, rounds=1, cohort=2)
    asked = result.history[0]["clients"]
    for client in data:
        assert client.test is not None
        x = client.test.x.double()  # type: ignore[union-attr]
        same = torch.equal(result.model(client.id)(x), result.model().double()(x))
        assert same is (client.id not in asked)


def test_fedrod_personal_loss_does_not_reach_the_body() -> None:
    # Clients with equal counts: the generic loss is cross-entropy, so the shared model is FedAvg's to rounding.
    y = np.array([0, 1, 2, 0, 1, 2])
    draw = np.random.default_rng(0)
    parts = [(draw.normal(size=(6, 6)).astype(np.float32), y) for _ in range(3)]
    data = fl.Federation.from_arrays([(p, p) for p in parts])
    plain, rod = fit("fedavg", data=data), fit("fedrod", data=data)
    for name, value in shared(plain).items():
        assert torch.allclose(value, shared(rod)[name], atol=1e-12)


@pytest.mark.parametrize("model", [mlp(), bn_mlp()])
def test_feddbe_without_its_parts_is_fedavg(model: object) -> None:
    assert identical(shared(fit("fedavg", model)), shared(fit("feddbe(kappa=0, bias=False)", model)))


def test_feddbe_term_by_hand() -> None:
    assert 2 * float(mean_gap(torch.tensor([1.0, 3.0]), torch.zeros(2))) == 5.0


def test_feddbe_asks_everybody_once_for_the_consensus() -> None:
    data = federation((9, 14, 5))
    result = fit("feddbe", data=data, cohort=1, rounds=1)
    run = run_of(result)
    net = run.bound.network.as_module({k: v for k, v in run.bound.start.items() if ":" not in k})
    z = [torch.tanh(net[0](c.train.x.double())) for c in data]  # type: ignore[index, union-attr, operator]
    assert torch.allclose(run.state.memory["feddbe"]["mean"], torch.cat(z).mean(0), atol=1e-12)


def test_feddbe_keeps_the_bias_of_absent_clients() -> None:
    result = fit("feddbe", data=federation((9, 14, 5, 8)), cohort=2, rounds=1)
    for name in run_of(result).sites:
        moved = bool(own(result, name)["feddbe:bias"].abs().max() > 0)
        assert moved is (name in result.history[0]["clients"])


def test_gpfl_without_steering_is_the_rectified_feature() -> None:
    d = 4
    z = torch.randn(3, d, generator=torch.Generator().manual_seed(0))
    still = {}
    for name in ("scale", "shift"):
        still |= {f"gpfl:{name}.weight": torch.eye(d), f"gpfl:{name}.bias": torch.zeros(d)}
        still |= {f"gpfl:{name}.gain": torch.zeros(d), f"gpfl:{name}.offset": torch.zeros(d)}
    assert torch.equal(conditioned(z, torch.ones(d), still), torch.relu(z))


def test_gpfl_with_uniform_labels_has_one_condition() -> None:
    seen: dict[str, list[torch.Tensor]] = {"conditions": []}
    import importlib

    gpfl = importlib.import_module("fedloom.methods.gpfl")

    real = gpfl.conditioned

    def watched(z: torch.Tensor, condition: torch.Tensor, leaves: dict[str, torch.Tensor]) -> torch.Tensor:
        seen["conditions"].append(condition.detach())
        return real(z, condition, leaves)

    x = np.random.default_rng(0).normal(size=(6, 6)).astype(np.float32)
    part = (x, np.array([0, 1, 2, 0, 1, 2]))
    gpfl.conditioned = watched
    try:
        fit("gpfl", data=fl.Federation.from_arrays([(part, part)]), rounds=1, epochs=1, batch_size="full")
    finally:
        gpfl.conditioned = real
    first, second = seen["conditions"][:2]
    assert torch.allclose(first, second, atol=1e-15)


@pytest.mark.parametrize("method", ["fedrod", "gpfl"])
def test_methods_that_need_classes_refuse_regression(method: str) -> None:
    net = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1))
    part = (np.zeros((4, 6), np.float32), np.zeros(4, np.float32))
    with pytest.raises(fl.UserError, match="regression"):
        fit(method, net, fl.Federation.from_arrays([(part, part)]), task="regression")
