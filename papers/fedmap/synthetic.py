"""FedMAP, Tables 1, 5 and 6: two classes in a hidden subspace, ten clients, under label, feature and quantity skew.

    PYTHONPATH=src python -m papers.fedmap.synthetic              # on a CPU
    PYTHONPATH=src python -m papers.fedmap.synthetic --table

20 rounds of 50 local epochs, Adam 1e-4, batch 64, 70/30 cut, standardised at every client (the settings of the authors' code). The published
"accuracy" is balanced accuracy; both are shown. "Individual" of the paper was trained for its own, unstated number of epochs, so local
training is read off after 100, 200, 400 and 1,000 epochs: the last is what FedMAP itself makes. FedBN is FedAvg here, bit for bit: the network
has no batch normalisation.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fedloom as fl
from fedloom.engines.vectorised import VectorisedEngine
from papers.lib import study, tables

HERE = Path(__file__).parent
METHODS = {
    "Local": "local",
    "FedMAP": "fedmap",
    "FedMAP, omega = n": "fedmap(preset='code')",
    "FedAvg": "fedavg",
    "FedProx 2.0": "fedprox(preset='fedmap')",
    "FedProx 0.01": "fedprox(mu=0.01)",
    "FedAvg, fine-tuned": "fedavg_ft",
    "Ditto": "ditto",
    "FedMAP, sigma2 = 1": "fedmap(sigma2=1.0)",
    "FedMAP, sigma2 = 150": "fedmap(sigma2=150.0)",
    "FedBN": "fedbn",
}
PUBLISHED = {  # averages over clients; the second pair of label and quantity skew: clients 6 to 10
    "label": {"Individual": (76.63, 64.91), "FedMAP": (84.84, 80.24), "FedBN": (63.28, 58.43), "FedProx 2.0": (54.91, 53.75), "FedAvg": (54.66, 53.46)},
    "feature": {"Individual": (83.38, None), "FedMAP": (86.27, None), "FedBN": (65.38, None), "FedProx 2.0": (63.00, None), "FedAvg": (63.10, None)},
    "quantity": {"Individual": (75.37, 64.18), "FedMAP": (79.06, 70.44), "FedBN": (63.80, 56.81), "FedProx 2.0": (61.54, 54.68), "FedAvg": (61.88, 55.21)},
}  # fmt: skip
EPOCHS = (100, 200, 400, 1000)
Metrics = dict[str, float]


def cases(options: argparse.Namespace) -> Iterator[study.Case]:
    """Seed by seed, skew by skew."""
    for seed in options.seeds:
        for skew in options.skews:
            for name in study.chosen(METHODS, options.only):
                yield {
                    "skew": skew,
                    "name": name,
                    "method": METHODS[name],
                    "seed": seed,
                    "rounds": options.rounds,
                    "epochs": options.epochs,
                    "nuisance": options.nuisance,
                }


def run(case: study.Case, step: Any) -> dict[str, Any]:
    """One method; the means over clients after every round, and by halves of the clients at the end."""
    data = fl.data.load("synthetic", skew=case["skew"], nuisance=case["nuisance"], seed=case["seed"])
    result = fl.fit(
        case["method"],
        "fedmap_mlp",
        data.partition(test=0.3, seed=case["seed"]),
        task="binary",
        rounds=case["rounds"],
        epochs=case["epochs"],
        batch_size=64,
        optimizer=fl.adam(1e-4),
        seed=case["seed"],
        engine=VectorisedEngine(step=step),
        device="cpu",
        progress=False,
    )
    found = study.measured(result)
    found["curve_balanced"] = [round(r["balanced_accuracy"], 5) for r in result.history]
    for metric in ("accuracy", "balanced_accuracy"):
        by_client = [client.metrics[metric] for client in result.clients.values()]
        found[f"{metric}_first"], found[f"{metric}_second"] = (
            statistics.mean(h) for h in (by_client[:5], by_client[5:])
        )
        found[f"{metric}_clients"] = by_client
    return found


def report(log: Path) -> str:
    """A table per skew: both metrics, the second half of the clients, the paired difference to local training of equal epochs."""
    texts = []
    for (skew,), lines in tables.by(study.read(log), "skew").items():
        named = tables.by(lines, "name")
        local, rows = named[("Local",)], []
        per_round = local[0]["case"]["epochs"]
        for epochs in EPOCHS:
            at = epochs // per_round - 1
            short = [x["found"]["curve_balanced"][at] for x in local if at < len(x["found"]["curve_balanced"])]
            plain = [x["found"]["curve_accuracy"][at][1] for x in local if at < len(x["found"]["curve_accuracy"])]
            if short and epochs < EPOCHS[-1]:
                rows.append([f"Local, {epochs} epochs", tables.spread(short), tables.spread(plain), "–", "–", "–", "–"])
        for (name,), found in named.items():
            paper = PUBLISHED[str(skew)].get("Individual" if name == "Local" else str(name))
            printed = "–" if paper is None else f"{paper[0]:.2f}" + ("" if paper[1] is None else f" ({paper[1]:.2f})")
            rows.append(
                [
                    "Local, equal epochs" if name == "Local" else str(name),
                    tables.spread(tables.values(found, "balanced_accuracy").values()),
                    tables.spread(tables.values(found, "accuracy").values()),
                    tables.spread(tables.values(found, "balanced_accuracy_second").values()),
                    *(
                        "–" if name == "Local" else tables.signed(tables.difference(found, local, metric))
                        for metric in ("balanced_accuracy", "balanced_accuracy_second")
                    ),
                    printed,
                ]
            )
        head = [
            "method",
            "balanced accuracy",
            "accuracy",
            "balanced, clients 6–10",
            "against Local",
            "6–10 against Local",
            "published (6–10)",
        ]
        texts.append(f"{skew} skew\n\n{tables.markdown(head, rows)}")
    return "\n\n".join(texts)


def main() -> None:
    """Runs what is missing, then shows the tables."""
    parser = study.arguments(__doc__, HERE / "results", rounds=20)
    parser.add_argument("--skews", nargs="+", choices=list(PUBLISHED), default=list(PUBLISHED))
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--nuisance", type=float, default=9.0)
    parser.add_argument("--step", default="compiled", help="of the engine; compiled steps are four times as fast here")
    options = parser.parse_args()
    log = options.out / "synthetic.jsonl"
    if not options.table:
        study.play(cases(options), lambda case: run(case, options.step), log, options)
    print(report(log))


if __name__ == "__main__":
    main()
