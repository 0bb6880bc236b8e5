"""Limits and hand-checkable cases of fedavg_ft, FedBABU, LG-FedAvg and Per-FedAvg."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fedloom as fl
from fedloom import rng
from fedloom.clients import batches
from fedloom.spec.parts import Phase, Sampler
from tests.helpers import bn_mlp, federation, fit, identical, mlp, own, run_of, shared
from tests.laws.personal import parabola, value

MODELS = [mlp(), bn_mlp()]


@pytest.mark.parametrize("model", MODELS)
def test_fine_tuning_never_moves_the_server(model: object) -> None:
    plain = fit("fedavg", model, cohort=2)
    for text in ("fedavg_ft", "fedavg_ft(finetune_epochs=0)", "fedavg_ft(part='head')"):
        assert identical(shared(plain), shared(fit(text, model, cohort=2)))
    zero = fit("fedavg_ft(finetune_epochs=0)", model, cohort=2)
    assert [r["loss"] for r in zero.history] == [r["loss"] for r in plain.history]
    assert fit("fedavg_ft", model).history[-1]["loss"] != plain.history[-1]["loss"]


@pytest.mark.parametrize("model", MODELS)
def test_fine_tuning_the_head_leaves_the_body_alone(model: object) -> None:
    result = fit("fedavg_ft(part='head')", model)
    body = {k: v for k, v in shared(result).items() if not k.startswith(("2.", "3."))}
    if model is MODELS[1]:
        body |= {k: v for k, v in shared(result).items() if k.startswith("1.")}
    for name in run_of(result).sites:
        assert identical(body, own(result, name))


@pytest.mark.parametrize("model", MODELS)
def test_fedbabu_keeps_the_common_head(model: object) -> None:
    result = fit("fedbabu", model)
    run = run_of(result)
    heads = [i.name for i in run.bound.structure.leaves if i.role == "head"]
    assert heads
    assert all(torch.equal(run.state.leaves[n], run.bound.start[n]) for n in heads)
    assert any(not torch.equal(own(result, "0")[n], run.bound.start[n]) for n in heads)
    assert identical(shared(result), shared(fit("fedbabu(finetune_epochs=0)", model)))
    assert result.history[0]["global_loss"] is not None


def test_fedbabu_is_fedrep_without_head_epochs() -> None:
    babu, rep = fit("fedbabu(finetune_epochs=0)", cohort=2), fit("fedrep(head_epochs=0)", cohort=2)
    assert identical(shared(babu), shared(rep))


def test_lg_fedavg_sends_the_head_only() -> None:
    net = nn.Sequential(nn.Linear(6, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 47))
    result = fit("lg_fedavg", net, federation((9, 14)), rounds=1, precision="fp32")
    assert result.history[0]["bytes_up"] == result.history[0]["bytes_down"] == 2 * 3055 * 4


def test_lg_fedavg_starts_from_fedavg() -> None:
    plain, later = fit("fedavg", rounds=2), fit("lg_fedavg(pretrain_rounds=2)", rounds=2)
    assert identical(shared(plain), shared(later))
    fresh, never = fit("lg_fedavg", rounds=2), fit("lg_fedavg(pretrain_rounds=0)", rounds=2)
    assert identical(shared(fresh), shared(never))


@pytest.mark.parametrize(("exact", "expected"), [(False, 0.55), (True, 0.595)])
def test_peravg_by_hand(exact: bool, expected: float) -> None:
    result = parabola(f"peravg(a=0.1, b=0.5, exact={exact})", start=1.0, target=0.0)
    assert value(shared(result)) == pytest.approx(expected, abs=1e-12)
    assert value(own(result, "0")) == pytest.approx(0.9 * expected, abs=1e-12)


def test_peravg_without_inner_step_is_fedavg_on_the_second_batches() -> None:
    data = federation((9, 14, 5))

    def second(client: str, round: int) -> list[torch.Tensor]:
        stream = rng.stream(0, "batches", client, round, "main")
        labels = data[client].train.y.numpy()
        phase = Phase(sampler=Sampler(group=2))
        steps = batches.plan(phase, labels, stream, epochs=2, batch_size=4, skip_single=False)
        return [torch.from_numpy(rows) for _, rows in steps]

    torch.manual_seed(0)
    net = mlp()().double()
    w = {k: v.detach().clone() for k, v in net.named_parameters()}
    moves = []
    for client in data:
        theta = {k: v.clone() for k, v in w.items()}
        for rows in second(client.id, 1):
            leaves = {k: v.clone().requires_grad_() for k, v in theta.items()}
            out = torch.func.functional_call(net, leaves, (client.train.x.double()[rows],))  # type: ignore[union-attr]
            grads = torch.autograd.grad(nn.functional.cross_entropy(out, client.train.y[rows]), list(leaves.values()))
            theta = {k: v - 0.3 * g for (k, v), g in zip(theta.items(), grads, strict=True)}
        moves.append(({k: theta[k] - w[k] for k in w}, len(client.train)))
    total = sum(n for _, n in moves)
    expected = {k: w[k] + sum(n / total * d[k] for d, n in moves) for k in w}
    for text in ("peravg(a=0, b=0.3)", "peravg(a=0, b=0.3, exact=True)"):
        found = shared(fit(text, net, data, rounds=1, optimizer=fl.sgd(0.01)))
        assert all(torch.allclose(found[k], expected[k], atol=1e-12) for k in w)


def test_peravg_leaves_the_running_statistics_to_the_second_batch() -> None:
    result = fit("peravg(a=0.1)", bn_mlp(), federation((8,)), rounds=1, epochs=1, batch_size=4)
    assert int(shared(result)["1.num_batches_tracked"]) == 1
