"""FedAIMS against a plain implementation of its Algorithms 1 and 2."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedloom as fl
from fedloom import rng
from tests.helpers import federation, fit, gap, own, shared
from tests.oracles import naive

WIDTHS, CLASSES = (5, 4, 4), 3


def deep() -> nn.Module:
    """Three hidden layers: blocks of width 5 and 4, and the head's input of width 4."""
    return nn.Sequential(
        nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, CLASSES)
    )


class Aims(nn.Module):
    """The network with its adapters and auxiliary heads, as the paper draws them."""

    def __init__(self, adapters: bool = True, heads: bool = True) -> None:
        super().__init__()
        self.net = naive.initial(deep)
        draw = rng.stream(0, "adapters", "aims")

        def linear(inputs: int, outputs: int) -> nn.Linear:
            made, bound = nn.Linear(inputs, outputs), 1 / np.sqrt(inputs)
            made.weight.data = torch.from_numpy(draw.uniform(-bound, bound, (outputs, inputs)))
            made.bias.data = torch.from_numpy(draw.uniform(-bound, bound, (outputs,)))
            return made

        self.sigma, self.aux = nn.ModuleDict(), nn.ModuleDict()
        for j, width in enumerate(WIDTHS[:-1], start=1):
            if adapters:
                self.sigma[str(j)] = nn.ModuleDict({"hidden": linear(WIDTHS[-1], 64), "out": linear(64, width)})
            if heads:
                self.aux[str(j)] = linear(width, CLASSES)

    def features(self, x: Tensor) -> list[Tensor]:
        found = []
        for i, layer in enumerate(self.net[:-1]):  # type: ignore[index]
            x = layer(x)
            if i % 2:
                found.append(x)
        return found

    def adapt(self, j: int, c: Tensor) -> Tensor:
        parts: Any = self.sigma[str(j)]
        return parts["out"](torch.relu(parts["hidden"](c)))  # type: ignore[no-any-return]


def distance(c: list[Tensor | None], u: Tensor, y: Tensor, sum_dim: bool) -> Tensor:
    """R: squared distances of the rows whose class has a prototype, over the batch and (unless summed) the dimensions."""
    total = torch.zeros((), dtype=torch.float64)
    for row, label in zip(u, y.tolist(), strict=True):
        centre = c[label]
        if centre is not None:
            total = total + ((centre - row) ** 2).sum()
    return total / len(y) / (1 if sum_dim else u.shape[1])


def task(model: Aims, j: int, u: Tensor, y: Tensor, c: list[list[Tensor | None]], options: dict[str, Any]) -> Tensor:
    """A^j = CE^j + mu R^j."""
    aux_ce, mu = options["aux_ce"], options["mu"]
    if options["prototypes"] == "blockwise":
        mine = c[j - 1]
    else:
        mine = [None if v is None else model.adapt(j, v) for v in c[-1]] if (mu or aux_ce == "prototype") else []
    total = torch.zeros((), dtype=torch.float64)
    if aux_ce == "head":
        total = total + F.cross_entropy(model.aux[str(j)](u), y)
    if aux_ce == "prototype":
        known = [k for k, v in enumerate(mine) if v is not None]
        for row, label in zip(u, y.tolist(), strict=True):
            if label in known:
                scores = torch.stack([-((row - mine[k]) ** 2).sum() for k in known])
                total = total - torch.log_softmax(scores, 0)[known.index(label)] / len(y)
    if mu:
        total = total + mu * distance(mine, u, y, options["reduction"] == "sum_dim")
    return total


def groups_of(similarity: np.ndarray, groups: int) -> dict[int, int]:
    """Algorithm 2."""
    members: list[list[int]] = [[] for _ in range(groups)]
    for i in range(len(similarity)):
        smallest = min(map(len, members))
        best, cost = None, np.inf
        for k in range(groups):
            if len(members[k]) == smallest:
                delta = sum(similarity[i][j] for j in members[k]) / len(members[k]) if members[k] else 0.0
                if round(delta, 10) < cost:
                    best, cost = k, round(delta, 10)
        assert best is not None
        members[best].append(i)
    members.sort(key=len)
    return {i: block for block, group in enumerate(members, start=1) for i in group}


def oracle(data: fl.Federation, cohort: int, rounds: int, full: bool = False, **changes: Any) -> dict[str, Any]:
    options = {"mu": 1.0, "aux_ce": "head", "reduction": "mean", "prototypes": "last", "similarity": "raw", "period": 1}
    options |= {"alpha": None, "lam": None, "adaptive": False} | changes
    blockwise, compares = options["prototypes"] == "blockwise", options["mu"] > 0 or options["aux_ce"] == "prototype"
    model = Aims(compares and not blockwise, options["aux_ce"] == "head")
    server = naive.state(model)
    body = [k for k in server if k.startswith("net.") and not k.startswith("net.6")]
    kept: dict[str, dict[str, Tensor]] = {}
    m = len(WIDTHS)
    centres: list[list[Tensor | None]] = [[None] * CLASSES for _ in WIDTHS]
    bodies: dict[str, Tensor] = {}
    used: dict[str, Tensor] = {}
    blocks_given = []
    for r in range(1, rounds + 1):
        people = naive.cohort(data, r, cohort)
        s = np.zeros((len(people), len(people)))
        for a, i in enumerate(people):
            for b, j in enumerate(people):
                if i.id in used and j.id in used:
                    s[a, b] = round(float(F.cosine_similarity(used[i.id], used[j.id], dim=0)), 10)
        given = groups_of(s, m - 1)
        blocks_given.append({p.id: given[a] for a, p in enumerate(people)})
        sums = [[torch.zeros(w, dtype=torch.float64) for _ in range(CLASSES)] for w in WIDTHS]
        counts, states, lengths = [0] * CLASSES, [], []
        for a, client in enumerate(people):
            model.load_state_dict({**server, **kept.get(client.id, {})})
            x, y = naive.rows(client)
            with torch.no_grad():
                for j, u in enumerate(model.features(x)):
                    for row, label in zip(u, y.tolist(), strict=True):
                        sums[j][label] += row
            for label in y.tolist():
                counts[label] += 1
            now = [list(c) for c in centres]

            def objective(mod: nn.Module, x: Tensor, y: Tensor, b: int = given[a], now: Any = now) -> Tensor:
                assert isinstance(mod, Aims)
                u = mod.features(x)
                main = F.cross_entropy(mod.net[-1](u[-1]), y)  # type: ignore[operator, index]
                if options["adaptive"]:
                    ce, aside = main.item(), F.cross_entropy(mod.aux[str(b)](u[b - 1]), y).item()
                    weighed = options | {"mu": options["mu"] * ce}
                    main = main + weighed["mu"] * distance(now[-1], u[-1], y, sum_dim=False)
                    return aside / (ce + aside) * main + ce / (ce + aside) * task(mod, b, u[b - 1], y, now, weighed)
                if options["mu"]:
                    main = main + options["mu"] * distance(now[-1], u[-1], y, options["reduction"] == "sum_dim")
                if full:
                    w = options["alpha"] or [1 / m] * m
                    return w[-1] * main + sum(w[j - 1] * task(mod, j, u[j - 1], y, now, options) for j in range(1, m))
                lam = options["lam"] or 1 / m
                return lam * main + (1 - lam) * task(mod, b, u[b - 1], y, now, options)

            naive.train(model, client, naive.order(client, r), objective)
            states.append(naive.state(model))
            lengths.append(float(len(client.train)))
            kept[client.id] = {k: v for k, v in states[-1].items() if k not in body}
            end, begin = (torch.cat([t[k].flatten() for k in body]) for t in (states[-1], server))
            bodies[client.id] = end if options["similarity"] == "raw" else end - begin
        mean = naive.average(states, lengths)
        server = {k: mean[k] if k in body else v for k, v in server.items()}
        for j in range(m):
            centres[j] = [sums[j][c] / counts[c] if counts[c] else centres[j][c] for c in range(CLASSES)]
        if r % options["period"] == 0:
            used = dict(bodies)
    return {"server": server, "kept": kept, "centres": centres, "blocks": blocks_given}


def spelled(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The oracle's names in fedloom's spelling."""
    found = {}
    for k, v in state.items():
        kind, _, rest = k.partition(".")
        if kind == "net":
            found[rest] = v
        elif kind == "sigma":
            found[f"aims:{rest}"] = v
        else:
            j, part = rest.split(".")
            found[f"aims:{j}.head.{part}"] = v
    return found


CASES = [
    ("fedaims", {}),
    ("fedaims(mu=0.3, lam=0.6)", {"mu": 0.3, "lam": 0.6}),
    ("fedaims(mu=0)", {"mu": 0.0}),
    ("fedaims(similarity='delta', period=2)", {"similarity": "delta", "period": 2}),
    ("fedaims(prototypes='blockwise')", {"prototypes": "blockwise"}),
    ("fedaims(aux_ce='none', reduction='sum_dim', mu=0.1)", {"aux_ce": "none", "reduction": "sum_dim", "mu": 0.1}),
    ("fedaims(aux_ce='prototype')", {"aux_ce": "prototype"}),
    ("fedaims(aux_ce='prototype', mu=0, prototypes='blockwise')", {"aux_ce": "prototype", "mu": 0.0, "prototypes": "blockwise"}),
    ("fedaims(weights='adaptive', mu=0.5)", {"adaptive": True, "mu": 0.5}),
    ("fedaims_full", {"full": True}),
    ("fedaims_full(alpha=[0.2, 0.3, 0.5], mu=0.5)", {"full": True, "alpha": [0.2, 0.3, 0.5], "mu": 0.5}),
    ("fedaims_full(prototypes='blockwise', aux_ce='none')", {"full": True, "prototypes": "blockwise", "aux_ce": "none"}),
]  # fmt: skip


@pytest.mark.parametrize(("method", "options"), CASES, ids=[c[0] for c in CASES])
def test_fedaims(method: str, options: dict[str, Any]) -> None:
    data = federation((9, 14, 5, 8, 7, 6), one_class=3)
    expected = oracle(data, 4, 4, **options)
    result = fit(method, deep, data, cohort=4, rounds=4)
    assert gap(spelled(expected["server"]), shared(result)) < 1e-10
    for client, mine in expected["kept"].items():
        held = own(result, client)
        found = spelled(mine)
        assert gap(found, {k: held[k] for k in found}) < 1e-10
    memory = result.run.state.memory if result.run else {}
    if "prototypes" in memory:
        wanted = expected["centres"] if options.get("prototypes") == "blockwise" else expected["centres"][-1:]
        rows = torch.stack([torch.cat([c[k] for c in wanted]) for k in range(CLASSES)])
        assert gap({"c": rows}, {"c": memory["prototypes"]["mean"]}) < 1e-10
    assert {b for given in expected["blocks"] for b in given.values()} == {1, 2}
