"""FedRoD, FedDBE and GPFL against plain loops."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.helpers import own, run_of, shared
from tests.oracles.personal import HEAD, LR, Params, World, close, grads, mean, taking_part


def test_fedrod() -> None:
    world = World()
    result = world.fit("fedrod")
    w = world.start()
    personal = {
        i: {"W": torch.zeros(3, 5, dtype=torch.float64), "b": torch.zeros(3, dtype=torch.float64)} for i in world.ids
    }
    for round, people in taking_part(result):
        local = []
        for i in people:
            theta, mine = dict(w), personal[i]
            counts = torch.bincount(world.y[i], minlength=3).double()
            prior = torch.where(counts > 0, counts.log(), -1e9)
            for (rows,) in world.steps(i, round):
                x, y = world.x[i][rows], world.y[i][rows]
                g = grads(lambda p: F.cross_entropy(world.logits(p, x) + prior, y), theta)  # noqa: B023
                z, generic = world.z(theta, x), world.logits(theta, x)
                h = grads(lambda p: F.cross_entropy(generic + z @ p["W"].T + p["b"], y), mine)  # noqa: B023
                theta = {k: theta[k] - LR * g[k] for k in theta}
                mine = {k: mine[k] - LR * h[k] for k in mine}
            personal[i] = mine
            local.append(theta)
        w = mean(local, [world.n[i] for i in people])
    assert close(w, shared(result))
    for i in world.ids:
        found = own(result, i)
        assert close({"fedrod:weight": personal[i]["W"], "fedrod:bias": personal[i]["b"]}, found)
        z = world.z(w, world.x[i])
        expected = world.logits(w, world.x[i]) + z @ personal[i]["W"].T + personal[i]["b"]
        assert torch.allclose(result.model(i)(world.x[i]), expected, atol=1e-10)
        assert torch.allclose(result.model()(world.x[i]).double(), world.logits(w, world.x[i]), atol=1e-10)


def test_feddbe() -> None:
    kappa, mu = 5.0, 0.3
    world = World()
    result = world.fit(f"feddbe(kappa={kappa}, mu={mu})")
    w, bias = world.start(), {i: torch.zeros(5, dtype=torch.float64) for i in world.ids}
    rows_everywhere = sum(world.n.values())
    consensus = sum(world.z(w, world.x[i]).mean(0) * world.n[i] / rows_everywhere for i in world.ids)
    for round, people in taking_part(result):
        local = []
        for i in people:
            theta: Params = {**w, "b": bias[i]}
            running = torch.zeros(5, dtype=torch.float64)
            for (rows,) in world.steps(i, round):
                x, y = world.x[i][rows], world.y[i][rows]

                def loss(p: Params, x: Tensor = x, y: Tensor = y, running: Tensor = running) -> Tensor:
                    z = world.z(p, x)
                    m = (1 - mu) * running + mu * z.mean(0)
                    logits = (z + p["b"]) @ p["2.weight"].T + p["2.bias"]
                    return F.cross_entropy(logits, y) + kappa * (0.5 * (m - consensus) ** 2).mean()

                g = grads(loss, theta)
                running = (1 - mu) * running + mu * world.z(theta, x).mean(0)
                theta = {k: theta[k] - LR * g[k] for k in theta}
            bias[i] = theta.pop("b")
            local.append(theta)
        w = mean(local, [world.n[i] for i in people])
    assert close(w, shared(result))
    for i in world.ids:
        assert close({"feddbe:bias": bias[i]}, own(result, i))
        z = world.z(w, world.x[i])
        expected = (z + bias[i]) @ w["2.weight"].T + w["2.bias"]
        assert torch.allclose(result.model(i)(world.x[i]), expected, atol=1e-10)


def test_gpfl() -> None:
    lam, mu = 0.2, 0.1
    world = World()
    result = world.fit(f"gpfl(lam={lam}, mu={mu})")
    extra = {k: v for k, v in run_of(result).bound.start.items() if k.startswith("gpfl:")}
    w: Params = {**{k: v for k, v in world.start().items() if k not in HEAD}, **extra}
    heads = {i: {k: world.start()[k] for k in HEAD} for i in world.ids}

    def valve(p: Params, name: str, c: Tensor) -> Tensor:
        hidden = torch.relu(p[f"gpfl:{name}.weight"] @ c + p[f"gpfl:{name}.bias"])
        normal = (hidden - hidden.mean()) / (hidden.var(correction=0) + 1e-5).sqrt()
        return normal * p[f"gpfl:{name}.gain"] + p[f"gpfl:{name}.offset"]

    def route(p: Params, z: Tensor, c: Tensor) -> Tensor:
        return torch.relu(z * (1 + valve(p, "scale", c)) + valve(p, "shift", c))

    def conditions(i: str, e: Tensor) -> tuple[Tensor, Tensor]:
        counts = torch.bincount(world.y[i], minlength=3).double()
        return (counts / counts.sum()) @ e, e.mean(0)

    for round, people in taking_part(result):
        local = []
        for i in people:
            theta = {**w, **heads[i]}
            old = w["gpfl:embeddings"]
            mine, all_alike = conditions(i, old)
            for (rows,) in world.steps(i, round):
                x, y = world.x[i][rows], world.y[i][rows]

                def loss(
                    p: Params, x: Tensor = x, y: Tensor = y, old: Tensor = old, c: Tensor = mine, c0: Tensor = all_alike
                ) -> Tensor:
                    z = world.z(p, x)
                    zg = route(p, z, c0)
                    cosines = F.cosine_similarity(zg[:, None], p["gpfl:embeddings"][None], dim=2)
                    out = route(p, z, c) @ p["2.weight"].T + p["2.bias"]
                    return F.cross_entropy(out, y) + F.cross_entropy(cosines, y) + lam * torch.norm(zg - old[y])

                g = grads(loss, theta)
                g = {k: v + mu * theta[k] if k.startswith("gpfl:") else v for k, v in g.items()}
                theta = {k: theta[k] - LR * g[k] for k in theta}
            heads[i] = {k: theta.pop(k) for k in HEAD}
            local.append(theta)
        w = mean(local, [world.n[i] for i in people])
    assert close(w, shared(result))
    for i in world.ids:
        assert close(heads[i], own(result, i))
        mine, _ = conditions(i, w["gpfl:embeddings"])
        expected = route(w, world.z(w, world.x[i]), mine) @ heads[i]["2.weight"].T + heads[i]["2.bias"]
        assert torch.allclose(result.model(i)(world.x[i]), expected, atol=1e-10)
