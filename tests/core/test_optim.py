"""SGD and Adam are torch.optim's, bit for bit, and idle clients are bitwise still."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedloom as fl
from fedloom.spec.optimizer import Optimizer

CASES: dict[str, tuple[Optimizer, Callable[[Any], torch.optim.Optimizer]]] = {
    "sgd": (fl.sgd(0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
    "decayed": (fl.sgd(0.1, weight_decay=0.01), lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.01)),
    "momentum": (fl.sgd(0.1, momentum=0.9), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    "nesterov": (
        fl.sgd(0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    ),
    "adam": (fl.adam(0.01), lambda p: torch.optim.Adam(p, lr=0.01)),
    "adam decayed": (
        fl.adam(0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1),
        lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1),
    ),
    "adamw": (fl.adamw(0.01, weight_decay=0.1), lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1)),
    "clipped": (fl.sgd(0.1, grad_clip=0.05), lambda p: torch.optim.SGD(p, lr=0.1)),
    "clipped adam": (fl.adam(0.01, grad_clip=0.05), lambda p: torch.optim.Adam(p, lr=0.01)),
}


def network(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", CASES)
def test_two_hundred_steps_are_torchs_bit_for_bit(case: str, dtype: torch.dtype) -> None:
    ours, make = CASES[case]
    theirs, mine = network(dtype), network(dtype)
    reference = make(theirs.parameters())
    params = list(mine.parameters())
    state = ours.init(params)
    draw = torch.Generator().manual_seed(0)
    for _ in range(200):
        x = torch.randn(8, 5, generator=draw).to(dtype)
        reference.zero_grad()
        theirs(x).square().mean().backward()
        if ours.grad_clip is not None:
            nn.utils.clip_grad_norm_(theirs.parameters(), ours.grad_clip)
        reference.step()
        grads = torch.autograd.grad(mine(x).square().mean(), params)
        ours.step_(params, list(grads), state, ours.lr)
    for a, b in zip(theirs.parameters(), params, strict=True):
        assert torch.equal(a, b)


def stacked(dtype: torch.dtype) -> tuple[list[Tensor], Callable[[], list[Tensor]]]:
    draw = torch.Generator().manual_seed(1)
    params = [torch.randn(4, *shape, generator=draw).to(dtype) for shape in ((3, 2), (2,), ())]
    return params, lambda: [torch.randn(p.shape, generator=draw).to(dtype) for p in params]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", CASES)
def test_idle_clients_are_still_and_the_others_move_as_alone(case: str, dtype: torch.dtype) -> None:
    ours, _ = CASES[case]
    params, draw = stacked(dtype)
    alone = [[p[i].clone() for p in params] for i in range(4)]
    state, states = ours.init(params), [ours.init(own) for own in alone]
    until = (20, 5, 12, 0)
    for step in range(20):
        grads = draw()
        active = torch.tensor([step < stop for stop in until])
        grads[0][3] = float("nan")  # an idle client's gradient may be anything
        before = [t.clone() for t in [*params, *(s for v in state.slots.values() for s in v)]]
        ours.step_(params, grads, state, ours.lr, None if bool(active.all()) else active, batched=True)
        after = [*params, *(s for v in state.slots.values() for s in v)]
        for old, new in zip(before, after, strict=True):
            assert torch.equal(old[~active], new[~active])
        for i in range(4):
            if active[i]:
                ours.step_(alone[i], [g[i] for g in grads], states[i], ours.lr)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    for i in range(4):
        for whole, own in zip(params, alone[i], strict=True):
            assert torch.allclose(whole[i], own, rtol=tolerance, atol=tolerance)
            if ours.grad_clip is None:
                assert torch.equal(whole[i], own)


@pytest.mark.parametrize("case", CASES)
def test_rate_and_step_as_tensors_change_nothing_beyond_rounding(case: str) -> None:
    ours, _ = CASES[case]
    (a, draw), (b, _) = stacked(torch.float64), stacked(torch.float64)
    plain, traced = ours.init(a), ours.init(b)
    traced.step = torch.zeros((), dtype=torch.float64)
    rate = torch.tensor(ours.lr, dtype=torch.float64)
    active = torch.tensor([True, False, True, True])
    for _ in range(30):
        grads = draw()
        ours.step_(a, [g.clone() for g in grads], plain, ours.lr, active)
        ours.step_(b, [g.clone() for g in grads], traced, rate, active)
    for x, y in zip(a, b, strict=True):
        assert torch.equal(x[1], y[1])
        assert torch.allclose(x, y, rtol=1e-12, atol=1e-13)
