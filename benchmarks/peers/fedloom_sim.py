"""fedloom beside its peers: what ``engine="auto"`` chooses, or another way that is named."""

from __future__ import annotations

import argparse
import os
import warnings

from common import WORKLOADS, Clock, arrays, network

import fedloom as fl
from fedloom.engines.vectorised import VectorisedEngine


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", choices=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--way", default="auto", choices=["auto", "loop", "traced", "compiled", "workers"])
    asked = parser.parse_args()
    work, clock = WORKLOADS[asked.workload], Clock()
    cpus = os.cpu_count() or 1
    options = {
        "auto": {"engine": "auto"},
        "loop": {"engine": "loop"},
        "traced": {"engine": VectorisedEngine(step="traced")},
        "compiled": {"engine": VectorisedEngine(step="compiled")},
        "workers": {"engine": "loop", "workers": cpus},
    }[asked.way]
    warnings.simplefilter("ignore")
    data = fl.Federation.from_arrays([((x, y), None) for x, y in arrays(work)])
    clock.marks.clear()
    clock.mark()
    fl.fit(
        "fedavg",
        network(work),
        data,
        rounds=asked.rounds + 1,
        cohort=work.cohort,
        epochs=work.epochs,
        batch_size=work.batch,
        optimizer=fl.adam(work.lr) if work.name == "mlp" else fl.sgd(work.lr),
        callbacks=[lambda record: clock.mark()],
        progress=False,
        **options,
    )
    clock.report(way=asked.way)


if __name__ == "__main__":
    main()
