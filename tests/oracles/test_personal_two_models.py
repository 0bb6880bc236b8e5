"""pFedMe, APFL and FedALA against plain loops."""

from __future__ import annotations

import torch

from fedloom.spec.parts import Sampler
from tests.helpers import own, shared
from tests.oracles.personal import HEAD, Params, World, close, grads, mean, taking_part


def test_pfedme() -> None:
    lam, K, eta, eta_p, beta = 3.0, 4, 0.07, 0.05, 0.6
    world = World()
    result = world.fit(f"pfedme(lam={lam}, K={K}, R=5, eta={eta}, eta_p={eta_p}, beta={beta})")
    w, theta = world.start(), {i: world.start() for i in world.ids}
    for round, people in taking_part(result):
        local = []
        for i in people:
            w_i, t = dict(w), dict(w)
            for (rows,) in world.steps(i, round, "own", steps=5, epochs=None):
                for _ in range(K):
                    g = grads(lambda p, rows=rows, i=i: world.loss(p, i, rows), t)  # type: ignore[misc]
                    t = {k: t[k] - eta_p * (g[k] + lam * (t[k] - w_i[k])) for k in t}
                w_i = {k: w_i[k] - eta * lam * (w_i[k] - t[k]) for k in t}
            theta[i] = t
            local.append(w_i)
        middle = mean(local, [1.0] * len(local))
        w = {k: (1 - beta) * w[k] + beta * middle[k] for k in w}
    assert close(w, shared(result))
    for i in world.ids:
        assert close({f"own/{k}": v for k, v in theta[i].items()}, own(result, i))


def test_apfl() -> None:
    world = World()
    result = world.fit("apfl(alpha=0.4)")
    w, v = world.start(), {i: world.start() for i in world.ids}
    a = {i: torch.tensor(0.4, dtype=torch.float64) for i in world.ids}
    for round, people in taking_part(result):
        local = []
        for i in people:
            mine, share = v[i], a[i]
            for step, (rows,) in enumerate(world.steps(i, round, "own")):
                bar = {k: share * mine[k] + (1 - share) * w[k] for k in w}
                g = grads(lambda p, rows=rows, i=i: world.loss(p, i, rows), bar)  # type: ignore[misc]
                if step == 0:
                    inner = sum((g[k] * (mine[k] - w[k])).sum() for k in w)
                    a[i] = (share - 0.1 * inner).clamp(0, 1)  # type: ignore[operator]
                mine = {k: mine[k] - 0.1 * share * g[k] for k in w}
            v[i] = mine
            local.append(world.sgd(w, i, world.steps(i, round)))
        w = mean(local, [world.n[i] for i in people])
    assert close(w, shared(result))
    for i in world.ids:
        found = own(result, i)
        assert close({f"own/{k}": p for k, p in v[i].items()}, found)
        assert abs(float(a[i] - found["own/apfl:a"])) < 1e-10
        x = world.x[i]
        mixed = {k: a[i] * v[i][k] + (1 - a[i]) * w[k] for k in w}
        assert torch.allclose(result.model(i)(x), world.logits(mixed, x), atol=1e-10)


class _Ala:
    """FedALA's local initialisation, as printed, for one client."""

    def __init__(self, world: World, client: str, share: float, eta_w: float) -> None:
        self.world, self.client, self.share, self.eta_w = world, client, share, eta_w
        self.W = {k: torch.ones_like(world.start()[k]) for k in HEAD}
        self.old: Params | None = None
        self.learnt = False

    def start(self, w: Params, round: int) -> tuple[Params, dict[str, torch.Tensor]]:
        W = dict(self.W)
        if self.old is None:
            return dict(w), W
        old = self.old

        def merged() -> Params:
            return {k: old[k] + (w[k] - old[k]) * W[k] if k in HEAD else w[k] for k in w}

        def steps(epochs: int) -> list[tuple[torch.Tensor, ...]]:
            return self.world.steps(self.client, round, "blend", epochs=epochs, sampler=Sampler(fraction=self.share))

        def move(rows: torch.Tensor) -> float:
            theta = merged()
            g = grads(lambda p: self.world.loss(p, self.client, rows), theta, HEAD)
            for k in HEAD:
                W[k] = (W[k] - self.eta_w * g[k] * (w[k] - old[k])).clamp(0, 1)
            return float(self.world.loss(theta, self.client, rows))

        for (rows,) in steps(1):
            move(rows)
        if not self.learnt:
            losses: list[float] = []
            for (rows,) in steps(19):
                if len(losses) >= 10 and float(torch.tensor(losses[-10:]).double().std(correction=0)) < 0.1:
                    break
                losses.append(move(rows))
        return merged(), W


def test_fedala() -> None:
    share, eta_w = 0.7, 5.0
    world = World()
    result = world.fit(f"fedala(share={share}, eta_w={eta_w})", rounds=4)
    w, people_of = world.start(), {i: _Ala(world, i, share, eta_w) for i in world.ids}
    for round, people in taking_part(result):
        local = []
        for i in people:
            client = people_of[i]
            theta, W = client.start(w, round)
            client.learnt, client.W = client.old is not None, W
            client.old = world.sgd(theta, i, world.steps(i, round))
            local.append(client.old)
        w = mean(local, [world.n[i] for i in people])
    assert close(w, shared(result))
    moved = False
    for i in world.ids:
        theta, W = people_of[i].start(w, 4)
        found = own(result, i)
        assert close(theta, found)
        assert close({f"fedala:{k}": v for k, v in W.items()}, found)
        moved = moved or any(bool(((v > 0) & (v < 1)).any()) for v in W.values())
    assert moved
