"""FedAS against plain loops."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.helpers import own, shared
from tests.oracles.personal import BATCH, BODY, HEAD, Params, World, close, grads, mean, taking_part


def fisher_trace(world: World, p: Params, i: str) -> float:
    """Sum over mini-batches, in order, of the squared norm of the mean loss's gradient; a last row joins the one before."""
    rows = list(range(0, world.n[i], BATCH))
    parts = [torch.arange(a, min(a + BATCH, world.n[i])) for a in rows]
    if len(parts) > 1 and len(parts[-1]) == 1:
        parts[-2:] = [torch.cat(parts[-2:])]
    total = 0.0
    for part in parts:
        total += sum(float((g**2).sum()) for g in grads(lambda q, part=part: world.loss(q, i, part), p).values())  # type: ignore[misc]
    return total


def test_fedas() -> None:
    align_lr = 0.3
    world = World()
    result = world.fit(f"fedas(align_lr={align_lr}, align_batch=6)")
    w = world.start()
    models: dict[str, Params] = {}
    heads = {i: {k: w[k] for k in HEAD} for i in world.ids}
    for round, people in taking_part(result):
        local, weights = [], []
        for i in people:
            old = models.get(i, {**w, **heads[i]})
            z, y = world.z(old, world.x[i]), world.y[i]
            means = {int(c): z[y == c].mean(0) for c in y.unique()}

            def gap(p: Params, rows: Tensor, i: str = i, means: dict[int, Tensor] = means) -> Tensor:
                z, y = world.z(p, world.x[i][rows]), world.y[i][rows]
                return torch.stack([((z[y == c] - means[int(c)]) ** 2).mean() for c in y.unique()]).sum()

            theta = {**w, **heads[i]}
            theta = world.sgd(theta, i, world.steps(i, round, "align", epochs=1, batch_size=6), gap, BODY, align_lr)
            theta = world.sgd(theta, i, world.steps(i, round))
            models[i], heads[i] = theta, {k: theta[k] for k in HEAD}
            weights.append(fisher_trace(world, theta, i))
            local.append(theta)
        w = {**w, **mean(local, weights, BODY)}
    assert close({k: w[k] for k in BODY}, shared(result))
    for i in world.ids:
        assert close(models.get(i, w), own(result, i))
