"""FedAF against plain loops."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom import rng
from fedloom.clients import batches
from fedloom.methods.fedaf import _RESAMPLE, _SLICES, DIRECTIONS
from fedloom.spec.parts import Phase
from tests.helpers import run_of, shared
from tests.oracles.personal import BATCH, LR, Params, World, close, grads, taking_part

IPC, STEPS, IMAGE_LR, GAMMA, LAM_LOC, LAM_GLOB, T, EPOCHS = 3, 4, 0.5, 0.7, 0.6, 0.4, 2.0, 2


def condensed(
    world: World, images: Tensor, w: Params, i: str, round: int, V: dict[int, Tensor], first: Params
) -> Tensor:
    """A client's images after a round."""
    key = torch.tensor(rng.key_of(0, "noise", i, round))
    sizes = [v.numel() for v in w.values()]
    held = set(world.y[i].tolist())
    for step, (rows,) in enumerate(world.steps(i, round, "images", steps=STEPS, epochs=None)):
        noise = rng.normal(rng.fold(key, _RESAMPLE, step), (sum(sizes),)).double().split(sizes)
        net = {}
        for (k, v), part in zip(w.items(), noise, strict=True):
            random = first[k].mean() + first[k].std(correction=0) * part.reshape(v.shape)
            net[k] = GAMMA * v + (1 - GAMMA) * random
        d = rng.normal(rng.fold(key, _SLICES, step), (DIRECTIONS, 3)).double()
        d = d / d.norm(dim=1, keepdim=True)
        x, y = world.x[i][rows], world.y[i][rows]

        def loss(p: Params, net: Params = net, x: Tensor = x, y: Tensor = y, d: Tensor = d) -> Tensor:
            total = torch.zeros((), dtype=torch.float64)
            for c in y.unique():
                gap = world.z(net, x[y == c]).mean(0) - world.z(net, p["S"][c]).mean(0)
                total = total + (gap**2).sum()
            mine = torch.stack([world.logits(net, p["S"][c]).mean(0) for c in range(3)])
            goal = torch.stack([V[c] if c in V else mine[c].detach() for c in range(3)])
            mine = torch.stack([mine[c] if c in held else goal[c] for c in range(3)])
            for direction in d:
                a, b = (mine @ direction).sort()[0], (goal @ direction).sort()[0]
                total = total + LAM_LOC * ((a - b) ** 2).mean() / len(d)
            return total

        images = images - IMAGE_LR * grads(loss, {"S": images})["S"]
    return images


def test_fedaf() -> None:
    world = World()
    result = world.fit(
        f"fedaf(ipc={IPC}, image_steps={STEPS}, image_lr={IMAGE_LR}, gamma={GAMMA}, lam_loc={LAM_LOC}, "
        f"lam_glob={LAM_GLOB}, temperature={T}, server_epochs={EPOCHS})"
    )
    first = w = world.start()
    sets: dict[str, Tensor] = {}
    V: dict[int, Tensor] = {}
    R: dict[int, Tensor] = {}
    for round, people in taking_part(result):
        logits = {i: world.logits(w, world.x[i]).detach() for i in people}
        for i in people:
            if i not in sets:
                own = [world.x[i][world.y[i] == c] for c in range(3)]
                rows = [[r[j % len(r)] if len(r) else torch.zeros(6).double() for j in range(IPC)] for r in own]
                sets[i] = torch.stack([torch.stack(r) for r in rows])
            sets[i] = condensed(world, sets[i], w, i, round, V, first)
        for c in range(3):
            some = torch.cat([logits[i][world.y[i] == c] for i in people])
            if len(some):
                V[c], R[c] = some.mean(0), torch.softmax(some / T, 1).mean(0)
        x = torch.cat([sets[i][c] for i in people for c in range(3) if (world.y[i] == c).any()])
        labels = [c for i in people for c in range(3) if (world.y[i] == c).any() for _ in range(IPC)]
        y = torch.tensor(labels)
        stream = rng.stream(0, "batches", "server", round, "main")
        phase = Phase(epochs=EPOCHS)
        steps = batches.plan(phase, y.numpy(), stream, epochs=2, batch_size=BATCH, skip_single=False)
        for (index,) in steps:
            part = torch.from_numpy(index)

            def loss(p: Params, x: Tensor = x[part], y: Tensor = y[part]) -> Tensor:
                total = F.cross_entropy(world.logits(p, x), y)
                for c in y.unique().tolist():
                    q = torch.softmax(world.logits(p, x[y == c]) / T, 1).mean(0)
                    sym = F.kl_div(q.log(), R[c], reduction="sum") + F.kl_div(R[c].log(), q, reduction="sum")
                    total = total + LAM_GLOB * 0.5 * sym
                return total

            g = grads(loss, w)
            w = {k: w[k] - LR * g[k] for k in w}
    assert close(w, shared(result))
    run = run_of(result)
    for i, images in sets.items():
        kept = run.clients[i].leaves["fedaf:images"]
        for c in set(world.y[i].tolist()):
            assert close({"S": images[c]}, {"S": kept[c]})
