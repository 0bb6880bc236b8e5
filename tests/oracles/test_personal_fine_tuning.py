"""FedAvg with fine-tuning, FedBABU, LG-FedAvg and Per-FedAvg against plain loops."""

from __future__ import annotations

import pytest

from fedloom.spec.parts import Sampler
from tests.helpers import own, shared
from tests.oracles.personal import BODY, HEAD, LR, Params, World, close, grads, mean, taking_part


@pytest.mark.parametrize("part", ["all", "head", "body"])
def test_fedavg_ft(part: str) -> None:
    world = World()
    result = world.fit(f"fedavg_ft(finetune_epochs=3, part='{part}')")
    names = {"all": None, "head": HEAD, "body": BODY}[part]
    w = world.start()
    for round, people in taking_part(result):
        w = mean([world.sgd(w, i, world.steps(i, round)) for i in people], [world.n[i] for i in people])
    assert close(w, shared(result))
    for i in world.ids:
        assert close(world.sgd(w, i, world.steps(i, 3, "finetune", epochs=3), names=names), own(result, i))


@pytest.mark.parametrize("part", ["all", "head", "body"])
def test_fedbabu(part: str) -> None:
    world = World()
    result = world.fit(f"fedbabu(finetune_epochs=2, part='{part}')")
    names = {"all": None, "head": HEAD, "body": BODY}[part]
    w = world.start()
    for round, people in taking_part(result):
        local = [world.sgd(w, i, world.steps(i, round), names=BODY) for i in people]
        w = {**w, **mean(local, [world.n[i] for i in people], BODY)}
    assert close(w, shared(result))
    for i in world.ids:
        assert close(world.sgd(w, i, world.steps(i, 3, "finetune", epochs=2), names=names), own(result, i))


@pytest.mark.parametrize("pretrain", [0, 1])
def test_lg_fedavg(pretrain: int) -> None:
    world = World()
    result = world.fit(f"lg_fedavg(pretrain_rounds={pretrain})")
    w, bodies = world.start(), {}
    for round, people in taking_part(result):
        weights = [world.n[i] for i in people]
        local = []
        for i in people:
            theta = world.sgd({**w, **(bodies.get(i, {}))}, i, world.steps(i, round))
            if round > pretrain:
                bodies[i] = {k: theta[k] for k in BODY}
            local.append(theta)
        w = {**w, **mean(local, weights, HEAD if round > pretrain else None)}
    assert close({k: w[k] for k in HEAD}, shared(result))
    for i in world.ids:
        assert close({**w, **bodies.get(i, {})}, own(result, i))


@pytest.mark.parametrize("exact", [False, True])
def test_peravg(exact: bool) -> None:
    a, b = 0.3, 0.2
    world = World()
    result = world.fit(f"peravg(a={a}, b={b}, exact={exact})")
    w = world.start()
    for round, people in taking_part(result):
        local = []
        for i in people:
            theta = dict(w)
            for first, second in world.steps(i, round, sampler=Sampler(group=2)):

                def composed(p: Params, i: str = i, first=first, second=second) -> object:  # type: ignore[no-untyped-def]
                    import torch

                    names = list(p)
                    g = torch.autograd.grad(world.loss(p, i, first), [p[k] for k in names], create_graph=True)
                    return world.loss({k: p[k] - a * v for k, v in zip(names, g, strict=True)}, i, second)

                if exact:
                    g = grads(composed, theta)  # type: ignore[arg-type]
                else:
                    d1 = grads(lambda p, i=i, rows=first: world.loss(p, i, rows), theta)  # type: ignore[misc]
                    moved = {k: theta[k] - a * d1[k] for k in theta}
                    g = grads(lambda p, i=i, rows=second: world.loss(p, i, rows), moved)  # type: ignore[misc]
                theta = {k: theta[k] - b * g[k] for k in theta}
            local.append(theta)
        w = mean(local, [world.n[i] for i in people])
    assert close(w, shared(result))
    assert a != LR
    for i in world.ids:
        assert close(world.sgd(w, i, world.steps(i, 3, "adapt", steps=1, epochs=None), lr=a), own(result, i))
