"""What the loop engine costs beside a hand-written PyTorch loop, on networks small enough for it to show."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from lib.side import HEADER, beside, row, tables, write
from torch import nn

import fedloom as fl


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(30, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 2))


def small_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 49, 10),
    )


def main() -> None:
    lines = [HEADER]
    rows = tables(4, 1400, (30,), 2)
    for name, theirs, ours in (
        ("MLP 30-32-16-2, Adam, batch 32", lambda p: torch.optim.Adam(p, lr=1e-3), fl.adam(1e-3)),
        ("MLP 30-32-16-2, SGD, batch 32", lambda p: torch.optim.SGD(p, lr=0.05), fl.sgd(0.05)),
        (
            "MLP 30-32-16-2, SGD momentum, batch 32",
            lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
            fl.sgd(0.05, momentum=0.9),
        ),
    ):
        times = beside(
            perceptron, rows, F.cross_entropy, theirs, rounds=9, epochs=2, batch_size=32, optimizer=ours, engine="loop"
        )
        lines.append(row(name, *times))
    pictures = tables(2, 500, (1, 28, 28), 10)
    times = beside(
        small_cnn,
        pictures,
        F.cross_entropy,
        lambda p: torch.optim.SGD(p, lr=0.05),
        rounds=9,
        epochs=1,
        batch_size=32,
        optimizer=fl.sgd(0.05),
        engine="loop",
    )
    lines.append(row("CNN 8-16 on 28x28, SGD, batch 32", *times))
    write("loop_overhead", lines)


if __name__ == "__main__":
    main()
