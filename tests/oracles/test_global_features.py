"""Methods that change the local objective of FedAvg, each once more from its paper: FedProto, MOON, FedIntR, FedDyn, FedNTD."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedloom as fl
from tests.helpers import bn_mlp, federation, fit, gap, mlp, own, run_of, shared
from tests.oracles import naive

ROUNDS, SIZE, LR = 3, 3, 0.1
DATA = federation((9, 14, 5, 8))
State = dict[str, Tensor]


def close(expected: State, found: State) -> None:
    floats = {k: v for k, v in expected.items() if v.is_floating_point()}
    assert gap(floats, {k: found[k] for k in floats}) < 1e-10


def run(method: fl.Method, make: Callable[[], Any], **options: Any) -> fl.Result:
    return fit(method, make, DATA, rounds=ROUNDS, cohort=SIZE, **options)


def three_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


@pytest.mark.parametrize("make", [mlp(), bn_mlp()])
@pytest.mark.parametrize("weight", ["n", "uniform"])
def test_fedproto(make: Callable[[], Any], weight: str) -> None:
    lam, classes = 0.7, 3
    models = {c.id: naive.initial(make) for c in DATA}
    bn = len(models["0"].state_dict()) > len(list(models["0"].parameters()))
    centres: dict[int, Tensor] = {}
    for r in range(1, ROUNDS + 1):
        sums: dict[int, list[tuple[Tensor, float]]] = {}
        for client in naive.cohort(DATA, r, SIZE):
            model = models[client.id]

            def loss(m: Any, x: Tensor, y: Tensor) -> Tensor:
                z = m[:-1](x)
                pull = [((z[i] - centres[int(c)]) ** 2).mean() for i, c in enumerate(y) if int(c) in centres]
                extra = lam * torch.stack(pull).sum() / len(y) if pull else 0.0
                return F.cross_entropy(m[-1](z), y) + extra

            naive.train(model, client, naive.order(client, r, bn=bn), loss)
            x, y = naive.rows(client)
            model.eval()
            z = model[:-1](x).detach()  # type: ignore[index]
            model.train()
            for c in range(classes):
                if (y == c).any():
                    count = float((y == c).sum())
                    sums.setdefault(c, []).append((z[y == c].mean(0), count if weight == "n" else 1.0))
        for c, parts in sums.items():
            centres[c] = sum(n * mean for mean, n in parts) / sum(n for _, n in parts)  # type: ignore[assignment]
    result = run(fl.fedproto(lam, weight), make)  # type: ignore[arg-type]
    for name, model in models.items():
        close(naive.state(model), own(result, name))
    kept = run_of(result).state.memory["prototypes"]
    for c, centre in centres.items():
        torch.testing.assert_close(kept["mean"][c], centre, rtol=1e-10, atol=1e-12)
    assert kept["known"].tolist() == [float(c in centres) for c in range(classes)]


def test_nearest_prototype_predicts() -> None:
    result = run(fl.fedproto(predict="nearest"), mlp())
    kept = run_of(result).state.memory["prototypes"]
    assert kept["known"].min() == 1
    desk = run_of(result).desk("1")
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(0)).double()
    z = torch.tanh(F.linear(x, desk.leaves["0.weight"], desk.leaves["0.bias"]))
    torch.testing.assert_close(desk.predict(x), -(torch.cdist(z, kept["mean"]) ** 2), rtol=1e-9, atol=1e-12)


def averaged(
    make: Callable[[], Any], start: State, loss: Callable[[Any, Tensor, Tensor, Any, Any], Tensor]
) -> tuple[State, dict[str, Any]]:
    """FedAvg whose clients minimise ``loss(model, x, y, received, previous)``; received and previous are eval-mode modules."""
    model = make().double()
    model.load_state_dict(start)
    previous: dict[str, Any] = {}
    bn = len(start) > len(list(model.parameters()))
    for r in range(1, ROUNDS + 1):
        states, weights = [], []
        received = naive.clone(model).eval()
        for client in naive.cohort(DATA, r, SIZE):
            mine, old = naive.clone(model), previous.get(client.id, received)
            objective = functools.partial(lambda g, o, m, x, y: loss(m, x, y, g, o), received, old)
            naive.train(mine, client, naive.order(client, r, bn=bn), objective)
            states.append(naive.state(mine))
            weights.append(float(len(client.train)))
            previous[client.id] = naive.clone(mine).eval()
        model.load_state_dict(naive.average(states, weights))
    return naive.state(model), previous


class Projected(nn.Module):
    """A model with projections of some of its features."""

    def __init__(self, model: nn.Sequential, widths: dict[int, int], out: int, hidden: int | None = None) -> None:
        super().__init__()
        self.model, self.at = model, widths
        self.nets = nn.ModuleDict(
            {
                str(i): nn.Sequential(nn.Linear(w, hidden or w), nn.ReLU(), nn.Linear(hidden or w, out))
                for i, w in widths.items()
            }
        )

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        found = []
        for i, layer in enumerate(self.model):
            if i in self.at:
                found.append(self.nets[str(i)](x))
            x = layer(x)
        return x, found


def projected_start(result: fl.Result, names: dict[str, str]) -> State:
    """Initial values for :class:`Projected`, from the run's own start."""
    start = run_of(result).bound.start
    found = {}
    for name, value in start.items():
        if ":" not in name:
            found[f"model.{name}"] = value
            continue
        net, layer, kind = name.split(":")[1].split(".")
        found[f"nets.{names[net]}.{0 if layer == '0' else 2}.{kind}"] = value
    return found


@pytest.mark.parametrize("make", [mlp(), bn_mlp()])
def test_moon(make: Callable[[], Any]) -> None:
    mu, tau = 2.0, 0.3

    def loss(m: Any, x: Tensor, y: Tensor, received: Any, old: Any) -> Tensor:
        z, zg, zp = m[:-1](x), received[:-1](x).detach(), old[:-1](x).detach()
        a, b = (torch.exp(torch.cosine_similarity(z, other, 1) / tau) for other in (zg, zp))
        return F.cross_entropy(m[-1](z), y) - mu * torch.log(a / (a + b)).mean()

    result = run(fl.moon(mu, tau), make)
    expected, previous = averaged(make, run_of(result).bound.start, loss)
    close(expected, shared(result))
    for name, model in previous.items():
        close(
            {k: v for k, v in naive.state(model).items() if v.is_floating_point()},
            run_of(result).clients[name].memory["moon"],
        )


def test_moon_with_projection() -> None:
    mu, tau = 2.0, 0.3

    def loss(m: Any, x: Tensor, y: Tensor, received: Any, old: Any) -> Tensor:
        out, (z,) = m(x)
        zg, zp = received(x)[1][0].detach(), old(x)[1][0].detach()
        a, b = (torch.exp(torch.cosine_similarity(z, other, 1) / tau) for other in (zg, zp))
        return F.cross_entropy(out, y) - mu * torch.log(a / (a + b)).mean()

    result = run(fl.moon(mu, tau, projection=7), mlp())
    start = projected_start(result, {"projection": "2"})
    expected, _ = averaged(lambda: Projected(mlp()(), {2: 5}, 7), start, loss)  # type: ignore[arg-type]
    found = shared(result)
    close({k: v for k, v in expected.items() if k.startswith("model.")}, {f"model.{k}": v for k, v in found.items()})
    torch.testing.assert_close(expected["nets.2.2.weight"], found["moon:projection.1.weight"], rtol=1e-10, atol=1e-12)


def test_fedintr() -> None:
    mu, tau = 2.0, 0.5

    def loss(m: Any, x: Tensor, y: Tensor, received: Any, old: Any) -> Tensor:
        out, features = m(x)
        parts, cosines = [], []
        for z, zg, zp in zip(features, received(x)[1], old(x)[1], strict=True):
            s_g, s_p = (torch.cosine_similarity(z, other.detach(), 1).mean() for other in (zg, zp))
            parts.append(-torch.log(torch.exp(s_g / tau) / (torch.exp(s_g / tau) + torch.exp(s_p / tau))))
            cosines.append(s_g / tau)
        weights = torch.softmax(torch.stack(cosines), 0)
        return F.cross_entropy(out, y) + mu * (weights * torch.stack(parts)).sum()

    result = run(fl.fedintr(mu, tau, projection=7), three_layers)
    assert run_of(result).bound.phases["main"].taps["fedintr"] == ("1", "z")
    start = projected_start(result, {"0": "2", "z": "4"})
    expected, _ = averaged(lambda: Projected(three_layers(), {2: 5, 4: 4}, 7, 7), start, loss)
    found = shared(result)
    close({k: v for k, v in expected.items() if k.startswith("model.")}, {f"model.{k}": v for k, v in found.items()})
    torch.testing.assert_close(expected["nets.2.0.weight"], found["fedintr:0.0.weight"], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("make", [mlp(), bn_mlp()])
def test_fedntd(make: Callable[[], Any]) -> None:
    beta, tau = 0.8, 2.0

    def others(logits: Tensor, y: Tensor) -> Tensor:
        keep = [[c for c in range(logits.shape[1]) if c != int(label)] for label in y]
        return torch.gather(logits, 1, torch.tensor(keep))

    def loss(m: Any, x: Tensor, y: Tensor, received: Any, old: Any) -> Tensor:
        out = m(x)
        student = F.log_softmax(others(out, y) / tau, 1)
        known = F.softmax(others(received(x).detach(), y) / tau, 1)
        return F.cross_entropy(out, y) + beta * tau**2 * F.kl_div(student, known, reduction="batchmean")

    result = run(fl.fedntd(beta, tau), make)
    close(averaged(make, run_of(result).bound.start, loss)[0], shared(result))


@pytest.mark.parametrize("make", [mlp(), bn_mlp()])
def test_feddyn(make: Callable[[], Any]) -> None:
    a = 0.3
    model = naive.initial(make)
    names = [n for n, _ in model.named_parameters()]
    zeros = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    h, g = dict(zeros), {c.id: dict(zeros) for c in DATA}
    mean: State = {}
    for r in range(1, ROUNDS + 1):
        w, states, rows = naive.state(model), [], []
        for client in naive.cohort(DATA, r, SIZE):
            mine = naive.clone(model)

            def loss(m: Any, x: Tensor, y: Tensor, mine: State = g[client.id], w: State = w) -> Tensor:
                linear = sum((mine[n] * p).sum() for n, p in m.named_parameters())
                return naive.cross_entropy(m, x, y) - linear + a / 2 * naive.square_distance(m, w)

            naive.train(mine, client, naive.order(client, r, bn=len(w) > len(names)), loss)
            after = naive.state(mine)
            g[client.id] = {n: g[client.id][n] - a * (after[n] - w[n]) for n in names}
            states.append(after)
            rows.append(float(len(client.train)))
        h = {n: h[n] - a / len(DATA) * sum(s[n] - w[n] for s in states) for n in names}
        mean = {n: sum(s[n] for s in states) / len(states) for n in names}  # type: ignore[misc]
        model.load_state_dict(naive.average(states, rows) | {n: mean[n] - h[n] / a for n in names})
    result = run(fl.feddyn(a), make)
    close(naive.state(model), shared(result))
    close(h, run_of(result).state.memory["feddyn"])
    close(mean, own(result, "0"))
    for name, state in run_of(result).clients.items():
        close(g[name], state.memory["feddyn"])
