"""Limits and hand-checkable cases of FedAS."""

from __future__ import annotations

import pytest
import torch

from fedloom.methods.fedas import class_means_gap
from fedloom.spec.reducers import mean
from fedloom.tasks.batch import Batch
from tests.helpers import bn_mlp, federation, fit, mlp, own, run_of, shared


def test_fisher_weights_by_hand() -> None:
    messages = [{"fisher": {"weight": torch.tensor(f)}} for f in (1.0, 3.0)]
    assert mean("fisher").weights(messages, [10, 10]) == [0.25, 0.75]


def test_gap_is_a_mean_within_classes_and_a_sum_over_them() -> None:
    z = torch.tensor([[1.0, 1.0], [3.0, 3.0], [2.0, 0.0]])
    batch = Batch(z, torch.tensor([0, 0, 1]))
    assert float(class_means_gap(z, batch, torch.zeros(3, 2))) == pytest.approx((1 + 9) / 2 + 2)
    masked = Batch(z, torch.tensor([0, 0, 1]), torch.tensor([1.0, 0.0, 1.0]))
    assert float(class_means_gap(z, masked, torch.zeros(3, 2))) == pytest.approx(1 + 2)


@pytest.mark.parametrize("model", [mlp(), bn_mlp()])
def test_without_alignment_one_client_is_fedper(model: object) -> None:
    # With one client every weight is 1; with several, only the weights differ from FedPer's.
    one, per = (fit(text, model, federation((11,))) for text in ("fedas(align_lr=0)", "fedper"))
    assert all(torch.equal(v, shared(one)[k]) for k, v in shared(per).items())


def test_without_alignment_the_local_work_is_fedpers() -> None:
    first, per = (fit(text, rounds=1) for text in ("fedas(align_lr=0)", "fedper"))
    for name in run_of(per).sites:
        mine, theirs = run_of(first).clients[name].leaves, run_of(per).clients[name].leaves
        assert all(torch.equal(v, mine[k]) for k, v in theirs.items())


def test_clients_that_were_not_asked_keep_their_model() -> None:
    data = federation((9, 14, 5, 8))
    once = fit("fedas", data=data, rounds=1, cohort=2)
    twice = fit("fedas", data=data, rounds=2, cohort=2)
    absent = set(once.history[0]["clients"]) - set(twice.history[1]["clients"])
    assert absent
    for name in absent:
        before, after = own(once, name), own(twice, name)
        assert all(torch.equal(v, after[k]) for k, v in before.items())
