"""Accuracy in short types: CIFAR-10 over 100 clients, Dirichlet 0.3, FedAvg and FedPer, fp32 and bf16 on the same seeds.

    FEDLOOM_DATA=... python benchmarks/precision.py --device cuda

Ten clients a round, one local epoch, batch 64, SGD with momentum 0.9. A difference is that of two runs with the same seed, hence the same
clients, starting weights and order of rows.
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from datetime import date
from pathlib import Path

import torch

import fedloom as fl
from fedloom.engines.vectorised import VectorisedEngine

RESULTS = Path(__file__).parent / "results"
NETWORKS = {"pfllib_cnn": fl.models.pfllib_cnn, "convnet4": fl.models.convnet4}
METRICS = {"fedavg": "global_accuracy", "fedper": "accuracy"}


def accuracy(
    method: str, network: str, images: fl.data.Dataset, seed: int, rounds: int, device: str, precision: str
) -> float:
    """Test accuracy after the last round, in per cent: of the shared model, or of the clients' own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = fl.fit(
            method,
            NETWORKS[network],
            images.partition(fl.dirichlet(0.3), clients=100, seed=seed),
            rounds=rounds,
            cohort=10,
            epochs=1,
            batch_size=64,
            optimizer=fl.sgd(0.02, momentum=0.9),
            seed=seed,
            engine=VectorisedEngine() if device == "cuda" else "auto",
            device=device,
            precision=precision,
            evaluate={"every": 0},
            progress=False,
        )
    return 100 * result.history[-1][METRICS[method]]


def main() -> None:
    """Runs all cases and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    images = fl.data.load("cifar10")
    lines = ["| network | method | fp32 | bf16 | bf16 - fp32 |", "|---|---|---|---|---|"]
    for network in NETWORKS:
        for method in METRICS:
            found = {
                p: [accuracy(method, network, images, s, options.rounds, options.device, p) for s in options.seeds]
                for p in ("fp32", "bf16")
            }
            apart = [b - a for a, b in zip(found["fp32"], found["bf16"], strict=True)]
            cells = [f"{statistics.mean(v):.2f} ± {statistics.stdev(v):.2f}" for v in (*found.values(), apart)]
            lines.append(f"| {network} | {method} | {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    where = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    head = f"# precision, {date.today().isoformat()}\n\n{where}, torch {torch.__version__}, {options.rounds} rounds, seeds {options.seeds}: mean ± standard deviation over seeds.\n\n{__doc__.strip().splitlines()[0]}"
    options.out.mkdir(exist_ok=True)
    (options.out / f"precision-{date.today().isoformat()}.md").write_text("\n".join([head, "", *lines, ""]))


if __name__ == "__main__":
    main()
