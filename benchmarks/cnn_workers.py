"""PFLlib's CNN, 10 clients of 500 CIFAR-shaped pictures, batch 64, SGD: two workers beside a hand-written loop of all threads."""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F
from lib.side import HEADER, beside, row, tables, write

import fedloom as fl


def main() -> None:
    cpus = os.cpu_count() or 1
    data = tables(10, 500, (3, 32, 32), 10)
    lines = [HEADER]
    for name, options in (
        (f"workers={cpus}", {"engine": "loop", "workers": cpus}),
        ("loop", {"engine": "loop"}),
    ):
        torch.set_num_threads(cpus)
        times = beside(
            fl.models.pfllib_cnn,
            data,
            F.cross_entropy,
            lambda p: torch.optim.SGD(p, lr=0.05),
            rounds=5,
            epochs=1,
            batch_size=64,
            threads=cpus,
            optimizer=fl.sgd(0.05),
            **options,
        )
        lines.append(row(name, *times))
    write("cnn_workers", lines)


if __name__ == "__main__":
    main()
