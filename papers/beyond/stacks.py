"""Which stack of the four papers is best, and what is left of it when few clients take part.

    PYTHONPATH=src python -m papers.beyond.stacks                       # digits, on a CPU
    PYTHONPATH=src python -m papers.beyond.stacks --data emnist47 --rows 9400 --device cuda
    PYTHONPATH=src python -m papers.beyond.stacks --table

20 clients, two local epochs, SGD, a ConvNet-3 of width 16. Participation: all clients, four of them (0.2), or one (0.05) in each of 40
rounds; "volatile": four are asked, half of them drop out and half of the others are stragglers. Accuracy is that of every client's own model on
its own test rows, mean over all clients; of the last five tests where the log has them, since a single round may drop by tens of points.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fedloom as fl
from papers.lib import study, tables

HERE = Path(__file__).parent
STACKS = {
    "Local": "local",
    "FedAvg": "fedavg",
    "FedPer": "fedper",
    "FedAIMS": "fedaims",
    "FedLAG k=2": "fedlag(k=2)",
    "FedMAP": "fedmap",
    "FedAvg + ISR": "fedavg + isr",
    "FedPer + ISR": "fedper + isr",
    "FedAIMS + ISR": "fedaims + isr",
    "FedAIMS + LAG": "fedaims + lag(k=1)",
    "FedPer + ISR + LAG": "fedper + isr + lag(k=1)",
    "FedAIMS + ISR + LAG": "fedaims + isr + lag(k=1)",
    "FedMAP + ISR": "fedmap + isr",
    "FedAIMS, lambda 0.9": "fedaims(lam=0.9)",
    "FedAIMS, mu 0.1": "fedaims(mu=0.1)",
    "FedAIMS, lambda 0.9, mu 0.1": "fedaims(lam=0.9, mu=0.1)",
    "FedAIMS, adaptive weights": "fedaims(weights='adaptive')",
    "FedLAG k=2, chosen once": "fedlag(k=2, schedule='warmup_once', warmup=10)",
}
PARTICIPATION: dict[str, tuple[float | int, dict[str, Any]]] = {
    "all": (1.0, {}),
    "0.2": (0.2, {}),
    "0.05": (0.05, {}),
    "volatile": (0.2, {"dropout": 0.5, "stragglers": 0.5}),
}


def cases(options: argparse.Namespace) -> Iterator[study.Case]:
    """Seed by seed."""
    for seed in options.seeds:
        for taking in options.participation:
            for name in study.chosen(STACKS, options.only):
                yield {
                    "data": options.data,
                    "name": name,
                    "method": STACKS[name],
                    "participation": taking,
                    "alpha": options.alpha,
                    "seed": seed,
                    "rounds": options.rounds,
                } | ({"rows": options.rows} if options.rows else {})


def run(case: study.Case, images: fl.data.Dataset, options: argparse.Namespace) -> dict[str, Any]:
    """One stack on one partition."""
    cohort, taking = PARTICIPATION[case["participation"]]
    result = fl.fit(
        case["method"],
        "convnet3(width=16)",
        images.partition(fl.dirichlet(case["alpha"]), clients=20, seed=case["seed"]),
        rounds=case["rounds"],
        cohort=cohort,
        participation=taking,
        epochs=2,
        batch_size=32,
        optimizer=fl.sgd(0.05),
        seed=case["seed"],
        device=options.device,
        evaluate={"every": options.every},
        progress=False,
    )
    return study.measured(result)


def report(log: Path) -> str:
    """Per data set: a row per stack, a column per kind of participation; ranks over all cells."""
    texts = []
    for (data, alpha), lines in tables.by(study.read(log), "data", "alpha").items():
        for line in lines:
            line["found"]["late"] = study.late(line["found"], "accuracy")
        metric = "accuracy" if any(x["found"]["late"] is None for x in lines) else "late"
        kinds = [k for k in PARTICIPATION if any(x["case"]["participation"] == k for x in lines)]
        groups = tables.by(lines, "name", "participation")
        names = list(dict.fromkeys(str(k[0]) for k in groups))
        ranks: dict[str, list[int]] = {n: [] for n in names}
        for cell in tables.by(lines, "participation", "seed").values():
            order = sorted(cell, key=lambda x, metric=metric: -x["found"][metric])
            order = [x for x in order if "," not in x["case"]["name"]]
            if len(order) == sum("," not in n for n in names):
                for place, line in enumerate(order, 1):
                    ranks[line["case"]["name"]].append(place)
        rows = []
        for name in names:
            row = [name]
            for kind in kinds:
                found, base = groups.get((name, kind), []), groups.get(("FedPer", kind), [])
                gain = tables.signed(tables.difference(found, base, metric), digits=1)
                row.append(f"{tables.spread(tables.values(found, metric).values(), digits=1)}; {gain}")
            rows.append([*row, f"{statistics.mean(ranks[name]):.1f}" if ranks[name] else "–"])
        head = ["stack", *(f"participation {k}; against FedPer" for k in kinds), "mean rank"]
        what = f"mean of the last {study.TESTS} tests" if metric == "late" else "last round"
        texts.append(f"{data}, Dirichlet {alpha}, {what}\n\n{tables.markdown(head, rows)}")
    return "\n\n".join(texts)


def main() -> None:
    """Runs what is missing, then shows the table."""
    parser = study.arguments(__doc__, HERE / "results", rounds=40, every=2)
    parser.add_argument("--data", default="digits")
    parser.add_argument("--alpha", type=float, default=0.1)
    parser.add_argument("--participation", nargs="+", choices=list(PARTICIPATION), default=list(PARTICIPATION))
    study.conduct(parser, "stacks.jsonl", cases, run, report)


if __name__ == "__main__":
    main()
