"""Peak memory and seconds of a training step and of evaluation: CamVid's size, batch 8, each network in a process of its own."""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
import warnings
from datetime import date
from pathlib import Path

import numpy as np
import torch

import fedloom as fl

NETWORKS = ("deeplabv3plus_resnet18", "topformer_t", "topformer_s", "topformer_b", "seaformer_t", "seaformer_s")
LIMIT = 4.0
RESULTS = Path(__file__).parent / "results"


def measure(
    network: str, method: str, engine: str, size: tuple[int, int], clients: int, device: str
) -> dict[str, float]:
    """One round of fit on random pictures: 16 training and 32 test frames a client."""
    draw = np.random.default_rng(0)

    def rows(n: int) -> tuple[np.ndarray, np.ndarray]:
        return draw.integers(0, 256, (n, 3, *size), np.uint8), draw.integers(0, 11, (n, *size))

    data = fl.Federation.from_arrays([(rows(16), rows(32)) for _ in range(clients)])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    begun = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = fl.fit(
            method,
            network,
            data,
            task="segmentation",
            rounds=1,
            batch_size=8,
            engine=engine,
            device=device,
            optimizer=fl.adam(1e-3),
            augment={"flip": 0.5, "scale": (0.75, 1.5), "colour": 0.2},
            progress=False,
        )
    found = {
        "before": before,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "seconds": time.perf_counter() - begun,
        "train": result.history[0]["seconds"],
    }
    if device == "cuda":
        found["gpu"] = torch.cuda.max_memory_allocated() / 2**30
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", nargs=3, metavar=("NETWORK", "METHOD", "ENGINE"))
    parser.add_argument("--size", nargs=2, type=int, default=(180, 240), metavar=("HEIGHT", "WIDTH"))
    parser.add_argument("--clients", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--networks", nargs="*", default=NETWORKS)
    options = parser.parse_args()
    size = (options.size[0], options.size[1])
    if options.one:
        network, method, engine = options.one
        print(json.dumps(measure(network, method, engine, size, options.clients, options.device)))
        return
    shown = f"{size[1]}x{size[0]}, batch 8, {options.clients} client(s), {options.device}"
    gpu = options.device == "cuda"
    head = (
        "| network | method | peak of the process, GiB |"
        + (" peak on the GPU, GiB |" if gpu else "")
        + " seconds (2 steps) |"
    )
    lines = [
        f"Memory of training and evaluation: {shown}, torch {torch.__version__}",
        "",
        head,
        "|" + "---|" * (head.count("|") - 1),
    ]
    worst = 0.0
    for network in options.networks:
        for method in ("fedavg", "fedavg + isr"):
            command = [sys.executable, __file__, "--one", network, method, "loop", "--size", *map(str, size)]
            command += ["--clients", str(options.clients), "--device", options.device]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found = json.loads(done.stdout.splitlines()[-1])
            worst = max(worst, found["peak"])
            more = f" {found['gpu']:.2f} |" if gpu else ""
            lines.append(f"| {network} | {method} | {found['peak']:.2f} |{more} {found['train']:.1f} |")
            print(lines[-1], flush=True)
    lines += ["", f"The most a process took: {worst:.2f} GiB (limit {LIMIT:g} GiB)."]
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"segmentation_memory-{options.device}-{date.today()}.md"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(lines[-1])
    sys.exit(options.device == "cpu" and worst > LIMIT)


if __name__ == "__main__":
    main()
