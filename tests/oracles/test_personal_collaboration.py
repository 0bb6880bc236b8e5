"""FedPAC and FedCAC against plain loops."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.helpers import own, run_of, shared
from tests.oracles.personal import BODY, HEAD, Params, World, close, mean, taking_part


def best_on_simplex(P: Tensor) -> Tensor:
    """``argmin a^T P a`` on the simplex by trying every set of positive weights."""
    best, found = torch.inf, torch.zeros(len(P), dtype=torch.float64)
    for size in range(1, len(P) + 1):
        for some in itertools.combinations(range(len(P)), size):
            on = list(some)
            x = torch.linalg.solve(P[on][:, on], torch.ones(size, dtype=torch.float64))
            x = x / x.sum()
            a = torch.zeros(len(P), dtype=torch.float64)
            a[on] = x
            if (x >= 0).all() and float(a @ P @ a) < best:
                best, found = float(a @ P @ a), a
    return found


def statistics(world: World, body: Params, i: str) -> tuple[Tensor, float]:
    z, y = world.z(body, world.x[i]), world.y[i]
    h = torch.zeros(world.classes, z.shape[1], dtype=torch.float64)
    v = 0.0
    for c in range(world.classes):
        some = z[y == c]
        if len(some):
            q = len(some) / len(y)
            h[c] = q * some.mean(0)
            v += q * float((some**2).sum(1).mean()) - q**2 * float((some.mean(0) ** 2).sum())
    return h, v / len(y)


def test_fedpac() -> None:
    lam, head_lr = 2.0, 0.2
    world = World()
    result = world.fit(f"fedpac(lam={lam}, head_epochs=2, head_lr={head_lr})")
    w = world.start()
    heads: dict[str, Params] = {}  # a client that has none begins with the mean of all heads
    centroids: dict[int, Tensor] = {}
    mixed = False
    for round, people in taking_part(result):
        local, hs, vs, sums = [], [], [], []
        for i in people:
            theta = {**w, **heads.get(i, {})}
            h, v = statistics(world, theta, i)
            hs.append(h)
            vs.append(v)
            z0, y0 = world.z(theta, world.x[i]), world.y[i]
            target = torch.stack(
                [
                    centroids[c] if c in centroids else z0[y0 == c].mean(0) if (y0 == c).any() else z0[0]
                    for c in range(world.classes)
                ]
            )
            theta = world.sgd(theta, i, world.steps(i, round, "head", epochs=2), names=HEAD, lr=head_lr)

            def loss(p: Params, rows: Tensor, i: str = i, target: Tensor = target, pulled: bool = round > 1) -> Tensor:
                ce = world.loss(p, i, rows)
                return ce + lam * F.mse_loss(world.z(p, world.x[i][rows]), target[world.y[i][rows]]) if pulled else ce

            theta = world.sgd(theta, i, world.steps(i, round), loss, BODY)
            z = world.z(theta, world.x[i])
            sums.append({c: (z[y0 == c].sum(0), int((y0 == c).sum())) for c in range(world.classes)})
            local.append(theta)
        for c in range(world.classes):
            count = sum(s[c][1] for s in sums)
            if count:
                centroids[c] = sum(s[c][0] for s in sums) / count  # type: ignore[assignment]
        for k, i in enumerate(people):
            D = torch.zeros(len(people), len(people), dtype=torch.float64)
            for a, b in itertools.product(range(len(people)), repeat=2):
                D[a, b] = ((hs[k] - hs[a]) * (hs[k] - hs[b])).sum()
            weights = best_on_simplex(torch.diag(torch.tensor(vs, dtype=torch.float64)) + D)
            weights[weights < 1e-3] = 0
            weights /= weights.sum()
            mixed = mixed or bool(((weights > 0) & (weights < 1)).any())
            heads[i] = {n: sum(x * t[n] for x, t in zip(weights, local, strict=True)) for n in HEAD}  # type: ignore[misc]
        w = mean(local, [world.n[i] for i in people])
    assert mixed
    assert close(w, shared(result), 1e-9)
    for i in world.ids:
        assert close({**w, **heads.get(i, {})}, own(result, i), 1e-9)
    memory = run_of(result).state.memory["prototypes"]
    assert close({str(c): v for c, v in centroids.items()}, {str(c): memory["mean"][c] for c in centroids}, 1e-9)


def test_fedcac() -> None:
    tau, beta = 0.4, 5
    world = World()
    result = world.fit(f"fedcac(tau={tau}, beta={beta})", cohort=3)
    w = world.start()
    masks: dict[str, Params] = {}
    custom: dict[str, Params] = {}
    joined = set()

    def begin(i: str) -> Params:
        if i not in masks:
            return dict(w)
        return {k: masks[i][k] * custom[i][k] + (1 - masks[i][k]) * w[k] for k in w}

    for round, people in taking_part(result):
        local = []
        for i in people:
            old = begin(i)
            new = world.sgd(old, i, world.steps(i, round))
            masks[i] = {}
            for k in new:
                s = ((new[k] - old[k]) * new[k]).abs()
                top = s.flatten().topk(int(tau * s.numel())).indices
                masks[i][k] = torch.zeros_like(s).flatten().index_fill(0, top, 1.0).reshape(s.shape)
            local.append(new)
        flat = [torch.cat([m.flatten() for m in masks[i].values()]) for i in people]
        O = torch.tensor([[float(1 - (a - b).abs().sum() / (2 * a.sum())) for b in flat] for a in flat])  # noqa: E741
        off = [float(O[a, b]) for a, b in itertools.permutations(range(len(people)), 2)]
        threshold = sum(off) / len(off) + round / beta * (max(off) - sum(off) / len(off))
        for a, i in enumerate(people):
            some = [b for b in range(len(people)) if a == b or float(O[a, b]) >= threshold]
            joined.add(len(some))
            custom[i] = mean([local[b] for b in some], [1.0] * len(some))
        w = mean(local, [world.n[i] for i in people])
    assert len(joined) > 1
    assert close(w, shared(result))
    for i in world.ids:
        assert close(begin(i), own(result, i))
