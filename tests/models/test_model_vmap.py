"""A cohort of clients mapped at once gives the numbers of a loop over them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from tests.models.cases import CASES, assert_close, client_state, params, scores, without_noise

CLIENTS = 3


def gradients(total: Tensor, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    return dict(zip(leaves, torch.autograd.grad(total, list(leaves.values())), strict=True))


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("case", params(CASES))
def test_vmap_equals_a_loop(case, training):
    torch.manual_seed(1)
    model = without_noise(case.make().double().train(training))
    leaves, buffers = client_state(case, CLIENTS)
    x = torch.stack([case.batch() for _ in range(CLIENTS)])
    weights = torch.randn_like(model(x[0]))

    looped = {k: v.clone().requires_grad_() for k, v in leaves.items()}
    loop_buffers = copy.deepcopy(buffers)
    outs, total = [], torch.zeros((), dtype=torch.float64)
    for k in range(CLIENTS):
        state = {n: v[k] for n, v in looped.items()} | {n: v[k] for n, v in loop_buffers.items()}
        value, out = scores(model, weights, state, x[k])
        outs.append(out)
        total = total + value

    mapped = {k: v.clone().requires_grad_() for k, v in leaves.items()}
    map_buffers = copy.deepcopy(buffers)
    values, out = torch.vmap(lambda p, b, rows: scores(model, weights, p | b, rows))(mapped, map_buffers, x)

    assert_close({"out": out}, {"out": torch.stack(outs)}, 1e-10)
    assert_close(gradients(values.sum(), mapped), gradients(total, looped), 1e-10)
    floats = {n for n, v in buffers.items() if v.is_floating_point()}
    assert_close({n: map_buffers[n] for n in floats}, {n: loop_buffers[n] for n in floats}, 1e-10)
    assert all(torch.equal(map_buffers[n], loop_buffers[n]) for n in buffers.keys() - floats)
    if training and floats:
        assert any(not torch.equal(map_buffers[n], buffers[n]) for n in floats)


@pytest.mark.parametrize("case", params([c for c in CASES if c.name in {"femnist_cnn", "topformer_t"}]))
def test_noise_differs_between_clients(case):
    torch.manual_seed(1)
    model = case.make().double().train()
    leaves, buffers = client_state(case, 1)
    same = {n: v.expand(CLIENTS, *v.shape[1:]).contiguous() for n, v in (leaves | buffers).items()}
    x = case.batch().expand(CLIENTS, *(-1,) * (len(case.shape) + 1))
    weights = torch.ones((), dtype=torch.float64)
    _, out = torch.vmap(lambda s, rows: scores(model, weights, s, rows), randomness="different")(same, x)
    assert not torch.allclose(out[0], out[1])
