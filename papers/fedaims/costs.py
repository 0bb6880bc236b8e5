"""FedAIMS, Tables 6, 7 and 8: what travels, what is stored, and what supervising one block instead of all saves in time.

    PYTHONPATH=src python -m papers.fedaims.costs            # Tables 6 and 8, exact, from the messages of one round
    PYTHONPATH=src python -m papers.fedaims.costs --time     # and the ratio of Table 7, on this machine

Sizes are MiB of the tensors that one client really receives and sends in a round; a client here holds every class. Parameters and prototypes
make up the published numbers; counts of the classes and the index of the block come on top (the last column).
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import fedloom as fl
from papers.lib import tables

MIB = 2**20
NETWORKS: dict[str, tuple[Callable[[], torch.nn.Module], tuple[int, int, int], int]] = {
    "EMNIST": (lambda: fl.models.convnet3(47), (1, 8, 8), 47),
    "CIFAR-10": (lambda: fl.models.convnet4(10), (3, 16, 16), 10),
    "CIFAR-100": (lambda: fl.models.resnet18(100, norm="bn_batch"), (3, 8, 8), 100),
    "TinyImageNet": (lambda: fl.models.resnet18(200, norm="bn_batch"), (3, 8, 8), 200),
}
TABLE6 = {
    "fedavg": ("0.59", "3.42", "85.60", "85.99"),
    "fedper": ("0.57", "3.41", "85.21", "85.21"),
    "lg_fedavg": ("0.02", "0.01", "0.39", "0.78"),
    "fedaims": ("0.59", "3.42", "85.60", "85.99"),
}
TABLE8 = {
    "EMNIST": (0.06, 13.77),
    "CIFAR-10": (0.19, 8.79),
    "CIFAR-100": (0.49, 219.73),
    "TinyImageNet": (0.49, 439.45),
}
TABLE7 = {"EMNIST": -14.64, "CIFAR-10": -12.59}


def one_round(method: str, name: str) -> fl.Result:
    """A round of one client that holds a row of every class."""
    make, shape, classes = NETWORKS[name]
    x = np.random.default_rng(0).normal(size=(classes, *shape)).astype(np.float32)
    rows = (x, np.arange(classes))
    data = fl.Federation.from_arrays([(rows, rows)])
    return fl.fit(method, make, data, rounds=1, batch_size=classes, device="cpu", engine="loop", progress=False)


def sizes() -> str:
    """Tables 6 and 8."""
    rows, whole = [], []
    for method, printed in TABLE6.items():
        row = [method]
        for name, paper in zip(NETWORKS, printed, strict=True):
            last = one_round(method, name).history[0]
            kinds = [last[f"bytes_{way}_by_kind"] for way in ("up", "down")]
            named = sum(k.get("parameters", 0) + k.get("prototypes", 0) for k in kinds)
            row.append(f"{named / MIB:.2f} ({paper})")
        rows.append([*row, f"{(last['bytes_up'] + last['bytes_down']) / MIB:.4f}"])
    text = tables.markdown(["MiB a round, ours (published)", *NETWORKS, "TinyImageNet, every byte"], rows)
    for name, (storage, saved) in TABLE8.items():
        result = one_round("fedaims", name)
        every = one_round("fedaims(prototypes='blockwise')", name)
        more = [r.history[0]["bytes_up_by_kind"]["prototypes"] for r in (every, result)]
        start = result.run.bound.start
        adapters = 4 * sum(v.numel() for n, v in start.items() if n.startswith("aims:") and ".head." not in n)
        last = 300 * 2 * one_round("fedaims", name).history[0]["bytes_up_by_kind"]["prototypes"]
        ours = 300 * 2 * (more[0] - more[1])
        whole.append(
            [name, f"{adapters / MIB:.2f} ({storage})", f"{ours / MIB:.2f} ({saved})", f"{(ours + last) / MIB:.2f}"]
        )
    head = ["", "stored, MiB (published)", "saved in 300 rounds, MiB (published)", "with the last block counted too"]
    return text + "\n\n" + tables.markdown(head, whole)


def times(repeats: int, rounds: int) -> str:
    """Table 7: CPU seconds of a round, sampled against full supervision, in turns so that a busy machine hits both alike."""
    rows = []
    for name, side in (("EMNIST", 28), ("CIFAR-10", 32)):
        make, shape, classes = NETWORKS[name]
        draw = np.random.default_rng(0)
        n = 128 if name == "EMNIST" else 64
        parts = [
            (draw.normal(size=(n, shape[0], side, side)).astype(np.float32), draw.integers(0, classes, n))
            for _ in range(4)
        ]
        data = fl.Federation.from_arrays([(p, p) for p in parts])
        ratios: dict[str, list[float]] = {"sampled": [], "main task alone": []}
        for _ in range(repeats):
            spent = {}
            for label, method in (("full", "fedaims_full"), ("sampled", "fedaims"), ("main task alone", "fedper")):
                begun = time.process_time()
                fl.fit(
                    method,
                    make,
                    data,
                    rounds=rounds,
                    batch_size=64,
                    device="cpu",
                    engine="loop",
                    evaluate={"every": 0},
                    progress=False,
                )
                spent[label] = time.process_time() - begun
            for label, found in ratios.items():
                found.append(100 * (spent[label] / spent["full"] - 1))
        shown = [f"{statistics.mean(v):+.1f} ± {statistics.stdev(v):.1f} %" for v in ratios.values()]
        rows.append([name, *shown, f"{TABLE7[name]:+.1f} %"])
    return tables.markdown(["", "FedAIMS against full", "FedPer against full", "published"], rows)


def main() -> None:
    """Shows the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    options: Any = parser.parse_args()
    warnings.simplefilter("ignore")
    print(sizes())
    if options.time:
        print("\n" + times(options.repeats, options.rounds))


if __name__ == "__main__":
    main()
