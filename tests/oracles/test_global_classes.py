"""FedIR, BalanceFL and FedGau, each once more from its paper, and the robust rules on real updates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fedloom as fl
from fedloom import rng
from tests.helpers import bn_mlp, federation, fit, gap, mlp, run_of, shared
from tests.oracles import naive

ROUNDS, SIZE, LR = 3, 3, 0.1
DATA = federation((9, 14, 5, 8), one_class=2)
State = dict[str, Tensor]


def close(expected: State, found: State) -> None:
    floats = {k: v for k, v in expected.items() if v.is_floating_point()}
    assert gap(floats, {k: found[k] for k in floats}) < 1e-10


def run(method: fl.Method | str, make: Callable[[], Any], **options: Any) -> fl.Result:
    return fit(method, make, DATA, rounds=ROUNDS, cohort=SIZE, **options)


def has_norm(model: Any) -> bool:
    return len(model.state_dict()) > len(list(model.parameters()))


@pytest.mark.parametrize("make", [mlp(), bn_mlp()])
@pytest.mark.parametrize("clip", [None, (0.8, 1.2)])
def test_fedir(make: Callable[[], Any], clip: tuple[float, float] | None) -> None:
    counts = {c.id: np.bincount(c.train.y.numpy(), minlength=3) for c in DATA}
    p = sum(counts.values()) / sum(c.sum() for c in counts.values())
    model = naive.initial(make)
    for r in range(1, ROUNDS + 1):
        states, weights = [], []
        for client in naive.cohort(DATA, r, SIZE):
            q = counts[client.id] / counts[client.id].sum()
            ratio = [p[c] / q[c] if q[c] else 0.0 for c in range(3)]
            ratio = ratio if clip is None else [min(max(v, clip[0]), clip[1]) for v in ratio]

            def loss(m: Any, x: Tensor, y: Tensor, ratio: list[float] = ratio) -> Tensor:
                rows = [ratio[int(c)] * F.cross_entropy(out[None], c[None]) for out, c in zip(m(x), y, strict=True)]
                return torch.stack(rows).sum() / len(y)

            mine = naive.clone(model)
            naive.train(mine, client, naive.order(client, r, bn=has_norm(model)), loss)
            states.append(naive.state(mine))
            weights.append(float(len(client.train)))
        model.load_state_dict(naive.average(states, weights))
    close(naive.state(model), shared(run(fl.fedir(clip), make)))


def root_of_covariance(z: Tensor, y: Tensor) -> Tensor:
    sigma = np.zeros((z.shape[1], z.shape[1]))
    for c in y.unique():
        part = z[y == c].numpy()
        sigma += len(part) * np.cov(part.T, bias=True) if len(part) > 1 else 0
    values, vectors = np.linalg.eigh(sigma / len(z))
    values = np.where(values > 1e-6 * values.max(), values, 0)
    return torch.from_numpy(vectors @ np.diag(np.sqrt(values)) @ vectors.T)


@pytest.mark.parametrize("make", [mlp(), bn_mlp()])
@pytest.mark.parametrize("augment", [True, False])
def test_balancefl(make: Callable[[], Any], augment: bool) -> None:
    lam, tau, entropy = 0.7, 1.5, 0.01
    model = naive.initial(make)
    bn = has_norm(model)
    for r in range(1, ROUNDS + 1):
        states, weights = [], []
        received = naive.clone(model).eval()
        for client in naive.cohort(DATA, r, SIZE):
            x, y = naive.rows(client)
            counts = torch.bincount(y, minlength=3)
            present = [c for c in range(3) if counts[c]]
            absent = [c for c in range(3) if not counts[c]]
            root = root_of_covariance(received[:-1](x).detach(), y)
            draw = rng.stream(0, "batches", client.id, r, "main")
            mine = naive.clone(model)
            optimizer = torch.optim.SGD(mine.parameters(), lr=LR)
            key, step = torch.tensor(rng.key_of(0, "noise", client.id, r)), 0
            for _ in range(2):
                chance = (1 / counts[y]).double() / (1 / counts[y]).double().sum()
                order = torch.from_numpy(draw.choice(len(y), size=len(y), p=chance.numpy()))
                for index in order.split(4):
                    if bn and len(index) == 1:
                        continue
                    xb, yb = x[index], y[index]
                    z = mine[:-1](xb)
                    logits = mine[-1](z)
                    fitted = logits
                    if augment:
                        folded = rng.fold(key, 0x62616C61, step)
                        lucky = (
                            rng.uniform(rng.fold(folded, 0), (len(yb),), torch.float64) < 1 - counts[yb] / counts.max()
                        )
                        noise = rng.normal(rng.fold(folded, 1), tuple(z.shape), torch.float64) @ root
                        fitted = mine[-1](
                            torch.stack([a + e if hit else a for a, e, hit in zip(z, noise, lucky, strict=True)])
                        )
                    place = torch.tensor([present.index(int(c)) for c in yb])
                    loss = F.cross_entropy(fitted[:, present], place)
                    if absent:
                        known = F.softmax(received(xb).detach()[:, absent] / tau, 1)
                        mean = F.kl_div(F.log_softmax(logits[:, absent] / tau, 1), known, reduction="batchmean")
                        loss = loss + lam * mean
                    prediction = F.softmax(logits[:, present], 1)
                    loss = loss + entropy * (prediction * prediction.log()).sum()
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    step += 1
            states.append(naive.state(mine))
            weights.append(float(len(client.train)))
        model.load_state_dict(naive.average(states, weights))
    close(naive.state(model), shared(run(fl.balancefl(lam, tau, entropy, augment), make)))


def test_fedgau() -> None:
    moments = {}
    for client in DATA:
        x = client.train.x.double().numpy()  # type: ignore[union-attr]
        mu, var = x.mean(1), x.var(1)
        moments[client.id] = (mu.mean(), (var + mu**2).mean() - mu.mean() ** 2, len(x))
    n = np.array([m[2] for m in moments.values()], float)
    mus, variances = (np.array([m[i] for m in moments.values()]) for i in (0, 1))
    centre = (n * mus).sum() / n.sum()
    width = (n * (variances + mus**2)).sum() / n.sum() - centre**2
    distance = 0.25 * (mus - centre) ** 2 / (variances + width)
    distance += 0.5 * np.log((variances + width) / (2 * np.sqrt(variances * width)))
    weight = dict(zip(moments, n / (distance + 1e-3), strict=True))
    model = naive.initial(mlp())
    for r in range(1, ROUNDS + 1):
        states, weights = [], []
        for client in naive.cohort(DATA, r, SIZE):
            mine = naive.clone(model)
            naive.train(mine, client, naive.order(client, r))
            states.append(naive.state(mine))
            weights.append(float(weight[client.id]))
        model.load_state_dict(naive.average(states, weights))
    close(naive.state(model), shared(run("fedgau", mlp())))
    assert max(weight.values()) / sum(weight.values()) > 0.3


def multi_krum(rows: np.ndarray, bad: int, keep: int) -> np.ndarray:
    scores = []
    for i, row in enumerate(rows):
        nearest = sorted(float(((row - other) ** 2).sum()) for j, other in enumerate(rows) if j != i)
        scores.append(sum(nearest[: len(rows) - bad - 2]))
    return rows[np.argsort(scores, kind="stable")[:keep]].mean(0)


RULES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "robust('median')": lambda rows: np.median(rows, 0),
    "robust('trimmed_mean', trim=0.25)": lambda rows: np.sort(rows, 0)[1:-1].mean(0),
    "robust('krum', bad=1)": lambda rows: multi_krum(rows, 1, 1),
    "robust('multi_krum', bad=1)": lambda rows: multi_krum(rows, 1, 3),
    "robust('multi_krum', bad=1, keep=2)": lambda rows: multi_krum(rows, 1, 2),
}


@pytest.mark.parametrize("text", RULES)
def test_robust(text: str) -> None:
    model = naive.initial(mlp())
    for r in range(1, ROUNDS + 1):
        before, moves = torch.nn.utils.parameters_to_vector(model.parameters()).detach(), []
        for client in DATA:
            mine = naive.clone(model)
            naive.train(mine, client, naive.order(client, r))
            moves.append((torch.nn.utils.parameters_to_vector(mine.parameters()).detach() - before).numpy())
        new = before + torch.from_numpy(RULES[text](np.stack(moves)))
        torch.nn.utils.vector_to_parameters(new, model.parameters())
    result = fit(f"fedavg + {text}", mlp(), DATA, rounds=ROUNDS)
    close(naive.state(model), shared(result))


def test_compress_with_feedback() -> None:
    share = 0.3
    model = naive.initial(mlp())
    left: dict[str, State] = {}
    for r in range(1, ROUNDS + 1):
        before, total, rows = naive.state(model), {}, 0.0
        for client in naive.cohort(DATA, r, SIZE):
            mine = naive.clone(model)
            naive.train(mine, client, naive.order(client, r))
            rest = {}
            for n, v in naive.state(mine).items():
                full = (v - before[n] + left.get(client.id, {}).get(n, 0.0)).flatten()
                best = full.abs().argsort(descending=True, stable=True)[: int(np.ceil(share * full.numel()))]
                sent = torch.zeros_like(full)
                sent[best] = full[best]
                rest[n] = (full - sent).reshape(v.shape)
                total[n] = total.get(n, 0.0) + len(client.train) * sent.reshape(v.shape)
            left[client.id] = rest
            rows += len(client.train)
        model.load_state_dict({n: before[n] + total[n] / rows for n in before})
    result = run(f"fedavg + compress('topk', share={share})", mlp())
    close(naive.state(model), shared(result))
    for name, rest in left.items():
        close(rest, run_of(result).clients[name].memory["compress"])
