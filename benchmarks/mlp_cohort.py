"""The small perceptron, 10 clients of 1,400 rows, batch 32, Adam, 5 epochs: eager and compiled beside a hand-written loop."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from lib.side import HEADER, beside, row, tables, write
from loop_overhead import perceptron

import fedloom as fl
from fedloom.engines.vectorised import VectorisedEngine


def main() -> None:
    data = tables(10, 1400, (30,), 2)
    lines = [HEADER]
    for name, engine in (
        ("loop", "loop"),
        ("vectorised, mapped", VectorisedEngine(step="mapped")),
        ("vectorised, traced", VectorisedEngine(step="traced")),
        ("vectorised, compiled", VectorisedEngine(step="compiled")),
    ):
        times = beside(
            perceptron,
            data,
            F.cross_entropy,
            lambda p: torch.optim.Adam(p, lr=1e-3),
            rounds=7,
            epochs=5,
            batch_size=32,
            optimizer=fl.adam(1e-3),
            engine=engine,
        )
        lines.append(row(name, *times))
    write("mlp_cohort", lines)


if __name__ == "__main__":
    main()
