"""FedAIMS, Table 2 (CIFAR-10): twelve methods, controls and variants under label skew, on one machine with a GPU.

    FEDLOOM_DATA=... python papers/fedaims/table2.py --alpha 0.1 --seeds 0 1 2 --rounds 100 --out papers/fedaims/results

The published protocol is 300 rounds; ``--rounds 300`` runs it. Each finished run is one line of ``cifar10.jsonl``, and runs that
are there already are not repeated.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from functools import partial
from pathlib import Path

import torch

import fedloom as fl

METHODS = {
    "Local": "local",
    "FedAvg": "fedavg",
    "FedProx": "fedprox(preset='fedaims')",
    "MOON": "moon",
    "FedPer": "fedper",
    "FedRep": "fedrep",
    "LG-FedAvg": "lg_fedavg",
    "Ditto": "ditto",
    "FedBABU": "fedbabu",
    "FedRoD": "fedrod",
    "FedALA": "fedala",
    "FedAIMS": "fedaims",
    "FedAIMS (full)": "fedaims_full",
    "FedAIMS (no aux CE)": "fedaims(aux_ce='none')",
    "FedLAG k=2": "fedlag(k=2)",
    "FedAvg(31) then local": "fedavg_then_local(rounds=31)",
}


def main() -> None:
    """Runs what is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--alpha", type=float, default=0.1)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--methods", nargs="*", default=list(METHODS))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--data-dir")
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument(
        "--stop-after", type=float, default=float("inf"), help="seconds after which no further run begins"
    )
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    log = options.out / "cifar10.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    key = ("method", "alpha", "seed", "rounds", "lr", "precision")
    done = {tuple(line[k] for k in key) for line in lines}
    begun = time.perf_counter()
    images = fl.data.load("cifar10", data_dir=options.data_dir)
    warnings.simplefilter("ignore", UserWarning)
    for seed in options.seeds:
        data = images.partition(fl.dirichlet(options.alpha), clients=100, seed=seed)
        for name in options.methods:
            if (name, options.alpha, seed, options.rounds, options.lr, options.precision) in done:
                continue
            if time.perf_counter() - begun > options.stop_after:
                return
            line = run(name, data, seed, options)
            with log.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(
                json.dumps({k: line[k] for k in ("method", "seed", "accuracy", "accuracy_std", "seconds", "wall")}),
                flush=True,
            )


def run(name: str, data: fl.Federation, seed: int, options: argparse.Namespace) -> dict[str, object]:
    """One method on one partition."""
    started = time.perf_counter()
    result = fl.fit(
        METHODS[name],
        partial(fl.models.convnet4, num_classes=10, in_channels=3),
        data,
        rounds=options.rounds,
        cohort=0.1,
        epochs=5,
        batch_size=64,
        optimizer=fl.sgd(lr=options.lr, momentum=0.9, weight_decay=1e-4, decay=0.99),
        seed=seed,
        precision=options.precision,
        evaluate={"every": options.every},
        progress=False,
    )
    last = result.history[-1]
    curve = [(r["round"], r["accuracy"]) for r in result.history if r.get("accuracy") is not None]
    kept = ("accuracy", "accuracy_std", "accuracy_worst10", "accuracy_weighted", "global_accuracy")
    return {
        "method": name,
        "text": METHODS[name],
        "alpha": options.alpha,
        "seed": seed,
        "rounds": options.rounds,
        "lr": options.lr,
        "precision": options.precision,
        **{k: last.get(k) for k in kept},
        "bytes_up": sum(r.get("bytes_up") or 0 for r in result.history),
        "bytes_down": sum(r.get("bytes_down") or 0 for r in result.history),
        "seconds": sum(r["seconds"] for r in result.history),
        "wall": time.perf_counter() - started,
        "curve": curve,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "fedloom": fl.__version__,
    }


if __name__ == "__main__":
    main()
