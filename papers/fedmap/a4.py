"""FedMAP, appendix A.4: linear regression on five heterogeneous clients, the published numbers beside ours.

    python papers/fedmap/a4.py                 # the table, medians over 200 draws of the data
    python papers/fedmap/a4.py --figures DIR   # and Figures 2 and 3, for the first draw

Clients: ``y = -x + 4 (k - 1) + N(0, 0.8)``, ``x ~ N(k - 1, 1)``, sizes 60, 1, 2, 3, 50. The prior is the learnable Gaussian of eq. 21 (eps =
1e-4, c = 1), w_k = N_k / N, ten rounds. Local problems are solved exactly. The server either minimises its problem in every round or makes
gradient steps (the paper states neither the rate nor the number of steps).
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import fedloom as fl
from fedloom.plugins.map_prior.priors import Gaps

SIZES = (60, 1, 2, 3, 50)
PUBLISHED = {"mu_a": -1.0735, "mu_b": 9.4882, "s_a": 1.9431, "s_b": 97.7605, "alpha_a": 0.3400, "alpha_b": 0.0101}
Rows = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Outcome:
    """What ten rounds give: gamma = (mu, s), the clients' models, and the pooled least-squares line."""

    mu: Tensor
    s: Tensor
    clients: Tensor
    pooled: Tensor

    def numbers(self) -> dict[str, float]:
        """By the paper's names."""
        alpha = 1 / (self.s + 1)
        names = ("mu_a", "mu_b", "s_a", "s_b", "alpha_a", "alpha_b")
        return dict(zip(names, map(float, [*self.mu, *self.s, *alpha]), strict=True)) | {
            "pooled slope": float(self.pooled[0])
        }


def draw(seed: int, sizes: tuple[int, ...] = SIZES) -> Rows:
    """The five clients' rows ``(design, y)``; a design row is (x, 1)."""
    rng = np.random.default_rng(seed)
    found = []
    for k, n in enumerate(sizes):
        x = rng.normal(k, 1, n)
        y = -x + 4 * k + rng.normal(0, math.sqrt(0.8), n)
        found.append((torch.from_numpy(np.c_[x, np.ones(n)]), torch.from_numpy(y)))
    return found


def solve(design: Tensor, y: Tensor, centre: Tensor, precision: Tensor) -> Tensor:
    """``argmin_theta mean (design theta - y)^2 + sum_i p_i/2 (theta_i - centre_i)^2``."""
    left = 2 * design.T @ design / len(y) + torch.diag(precision)
    return torch.linalg.solve(left, 2 * design.T @ y / len(y) + precision * centre)


def fedmap(
    rows: Rows, start: Tensor, rounds: int = 10, eps: float = 1e-4, lr: float | None = None, steps: int = 1
) -> Outcome:
    """Rounds of eqs. 2 and 3 with exact local minima; ``lr=None`` minimises the server's problem in every round."""
    prior = fl.learnable_gaussian(eps=eps)
    weights = torch.tensor([len(y) for _, y in rows], dtype=torch.float64)
    weights = weights / weights.sum()
    mu: Tensor = start.clone()
    s: Tensor | None = torch.zeros(2, dtype=torch.float64)
    for _ in range(rounds):
        assert s is not None
        gap = torch.stack([solve(d, y, mu, 1 / (s + 1)) for d, y in rows]) - mu
        gaps = Gaps(mean=weights @ gap, square=weights @ gap**2)
        if lr is None:
            move, s = prior.minimise(gaps, mu, 1.0, s)
        else:
            move = torch.zeros_like(mu)
            for _ in range(steps):
                down, wide = prior.slope(gaps, mu, move, 1.0, s)
                assert wide is not None
                move, s = move - lr * down, prior.inside(s - lr * wide)
        mu = mu + move
    assert s is not None
    clients = torch.stack([solve(d, y, mu, 1 / (s + 1)) for d, y in rows])
    everything, targets = torch.cat([d for d, _ in rows]), torch.cat([y for _, y in rows])
    return Outcome(mu, s, clients, torch.linalg.lstsq(everything, targets[:, None]).solution[:, 0])


def ditto(rows: Rows, pooled: Tensor, sigma: float = 0.1) -> Tensor:
    """Personal models around the pooled line, with the paper's sigma_a = sigma_b = 0.1."""
    return torch.stack([solve(d, y, pooled, torch.full((2,), sigma, dtype=torch.float64)) for d, y in rows])


def errors(models: Tensor, seed: int) -> list[float]:
    """Mean squared error of each client's model on 2,000 fresh rows."""
    fresh = draw(seed + 1_000_000, (2000,) * len(SIZES))
    return [float(((d @ m - y) ** 2).mean()) for m, (d, y) in zip(models, fresh, strict=True)]


def study(seeds: int) -> dict[str, Any]:
    """Medians over draws of the data and of the start, and test errors."""
    exact: list[dict[str, float]] = []
    steps: list[dict[str, float]] = []
    error: dict[str, list[list[float]]] = {"FedMAP": [], "Ditto, sigma 0.1": [], "pooled line": [], "local": []}
    for seed in range(seeds):
        rows, start = draw(seed), torch.from_numpy(np.random.default_rng(seed + 7).normal(size=2))
        found = fedmap(rows, start)
        exact.append(found.numbers())
        steps.append(fedmap(rows, start, lr=1.0).numbers())
        lines = {
            "FedMAP": found.clients,
            "Ditto, sigma 0.1": ditto(rows, found.pooled),
            "pooled line": found.pooled.expand(5, 2),
            "local": torch.stack([torch.linalg.lstsq(d, y[:, None], driver="gelsd").solution[:, 0] for d, y in rows]),
        }
        for name, models in lines.items():
            error[name].append(errors(models, seed))
    middle = {k: float(np.median([e[k] for e in exact])) for k in exact[0]}
    return {
        "exact": middle,
        "steps": {k: float(np.median([e[k] for e in steps])) for k in steps[0]},
        "error": {name: np.median(np.array(v), 0).tolist() for name, v in error.items()},
    }


def stationary_spread(s: float, eps: float = 1e-4) -> float:
    """The weighted variance around mu that a stationary s needs: ``V = 4 eps s (s + 1)^2``."""
    return 4 * eps * s * (s + 1) ** 2


def table(found: dict[str, Any]) -> str:
    """As text."""
    lines = [f"{'':14}{'published':>12}{'exact server':>15}{'one step, rate 1':>19}"]
    for name in found["exact"]:
        published = f"{PUBLISHED[name]:.4f}" if name in PUBLISHED else "positive"
        lines.append(f"{name:14}{published:>12}{found['exact'][name]:>15.4f}{found['steps'][name]:>19.4f}")
    lines += ["", f"{'test error':20}" + "".join(f"{f'client {k + 1}':>11}" for k in range(5))]
    for name, values in found["error"].items():
        lines.append(f"{name:20}" + "".join(f"{v:>11.2f}" for v in values))
    need = stationary_spread(PUBLISHED["s_b"])
    lines += [
        "",
        f"The published s_b = 97.7605 is not stationary: it needs a variance of {need:.0f} of b around mu_b, and b lies in 0 .. 16.",
    ]
    return "\n".join(lines)


def figures(folder: Path, seed: int = 0) -> list[Path]:
    """Figures 2 and 3."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = draw(seed)
    found = fedmap(rows, torch.from_numpy(np.random.default_rng(seed + 7).normal(size=2)))
    fresh = draw(seed + 1_000_000, (60,) * 5)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    plots = (
        ("figure2", rows, {"data": None, "pooled": found.pooled.expand(1, 2), "FedMAP, mu": found.mu.expand(1, 2)}),
        ("figure3", fresh, {"data": None, "Ditto, 0.1": ditto(rows, found.pooled), "FedMAP": found.clients}),
    )
    for name, shown, panels in plots:
        figure, axes = plt.subplots(1, 3, figsize=(12, 3.6), sharey=True)
        for axis, (title, models) in zip(axes, panels.items(), strict=True):
            for k, (d, y) in enumerate(shown):
                axis.scatter(d[:, 0], y, s=8, color=f"C{k}")
                if models is not None:
                    line = models[k if len(models) > 1 else 0]
                    at = torch.tensor([k - 3.0, k + 3.0]) if len(models) > 1 else torch.tensor([-3.0, 7.0])
                    axis.plot(at, line[0] * at + line[1], color=f"C{k}" if len(models) > 1 else "black")
            axis.set_title(title)
        paths.append(folder / f"{name}.png")
        figure.savefig(paths[-1], dpi=120, bbox_inches="tight")
        plt.close(figure)
    return paths


def main() -> None:
    """Shows the table and draws the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--figures", type=Path)
    options = parser.parse_args()
    print(table(study(options.seeds)))
    if options.figures is not None:
        for path in figures(options.figures):
            print(path)


if __name__ == "__main__":
    main()
