"""OmniISR's hybrid mode, for which the paper has no experiment: cloud fraction x mixing rule x ISR, with controls.

    PYTHONPATH=src python -m papers.omniisr.hybrid --device cuda --seeds 0 1 2 --stop-after 540
    PYTHONPATH=src python -m papers.omniisr.hybrid --data digits --seeds 0 1 2            # on a CPU
    PYTHONPATH=src python -m papers.omniisr.hybrid --table

Dirichlet 0.1 over 20 clients, half of them a round, two local epochs, SGD. A share of every site's rows is moved to the cloud, which works as
a site does. Networks have group normalisation: batch statistics of one-class test batches would judge the batches, not the model. Controls: federated training on all rows (nothing moved), federated training without the rows of the cloud (a = 0 for ever), the
cloud alone (a = 1 for ever), centralised training on all rows. The record keeps a and cos(d_CL, d_FL) of every round.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fedloom as fl
from papers.lib import study, tables

HERE = Path(__file__).parent
MIXING: dict[str, dict[str, Any]] = {
    "sites alone": {"mixing": "fixed", "alpha": 0.0},
    "cloud alone": {"mixing": "fixed", "alpha": 1.0},
    "alternate": {"mixing": "alternate"},
    "fixed 0.25": {"mixing": "fixed", "alpha": 0.25},
    "fixed 0.5": {"mixing": "fixed", "alpha": 0.5},
    "fixed 0.75": {"mixing": "fixed", "alpha": 0.75},
    "signed": {"mixing": "adaptive", "rule": "signed"},
    "literal": {"mixing": "adaptive", "rule": "literal"},
    "proportional": {"mixing": "adaptive", "rule": "proportional"},
}
MODELS = {
    "cifar10": "convnet4(width=64, norm='gn')",
    "emnist47": "convnet3(width=32, norm='gn')",
    "digits": "convnet3(width=16, norm='gn')",
    "camvid": "topformer_t",
}


def cases(options: argparse.Namespace) -> Iterator[study.Case]:
    """Seed by seed: controls first, then the fractions."""
    names = study.chosen(MIXING, options.only)
    for seed in options.seeds:
        for isr in options.isr:
            common = {
                "data": options.data,
                "model": MODELS[options.data],
                "isr": isr,
                "alpha": options.alpha,
                "clients": options.clients,
                "seed": seed,
            }
            common |= {"rounds": options.rounds, "lr": options.lr, "precision": options.precision}
            common |= {"rows": options.rows} if options.rows else {}
            yield {"mode": "centralised", "fraction": 0.0, "mixing": "–", **common}
            yield {"mode": "federated", "fraction": 0.0, "mixing": "–", **common}
            for fraction in options.fractions:
                for name in names:
                    yield {"mode": "hybrid", "fraction": fraction, "mixing": name, **common}


def run(case: study.Case, pictures: fl.data.Dataset, options: argparse.Namespace) -> dict[str, Any]:
    """One run."""
    scenes = case["data"] == "camvid"
    if scenes:
        data = pictures.partition(fl.natural(), seed=case["seed"])
    else:
        data = pictures.partition(fl.dirichlet(case["alpha"]), clients=case["clients"], seed=case["seed"])
    hybrid = None
    if case["mode"] == "hybrid":
        hybrid = {"cloud_fraction": case["fraction"], **MIXING[case["mixing"]]}
    result = fl.fit(
        "fedavg + isr" if case["isr"] == "on" else "fedavg",
        MODELS[case["data"]],
        data,
        mode=case["mode"],
        task="segmentation" if scenes else "classification",
        rounds=case["rounds"],
        cohort=1.0 if scenes or case["mode"] == "centralised" else 0.5,
        epochs=2,
        batch_size=8 if scenes else 64,
        optimizer=fl.adam(1e-3, weight_decay=1e-4, decay=0.95) if scenes else fl.sgd(case["lr"]),
        augment={"flip": 0.5, "scale": (0.75, 1.5)} if scenes else None,
        hybrid=hybrid,
        seed=case["seed"],
        engine=study.engine(options),
        device=options.device,
        precision=case["precision"],
        evaluate={"every": options.every},
        progress=False,
    )
    keep = ("alpha", "alignment") if case["mode"] == "hybrid" else ()
    return study.measured(result, "miou" if scenes else "accuracy", keep)


def report(log: Path) -> str:
    """Accuracy of the shared model on all test rows: of the last round, and the mean of the last tests."""
    lines, rows = study.read(log), []
    for line in lines:
        line["found"]["late"] = study.late(line["found"], "global_miou", "global_accuracy")
    groups = tables.by(lines, "data", "mode", "fraction", "mixing", "isr", "rounds")
    for (data, mode, fraction, mixing, isr, rounds), found in groups.items():
        metric = "global_miou" if data == "camvid" else "global_accuracy"
        base = groups.get((data, "federated", 0.0, "–", isr, rounds), [])
        last = [x["found"]["alpha"][-1] for x in found if x["found"].get("alpha")]
        cosines = [v for x in found for v in x["found"].get("alignment", []) if v is not None]
        rows.append(
            [str(v) for v in (data, rounds, isr, mode, fraction, mixing)]
            + [text for m in (metric, "late") for text in (
                tables.spread(tables.values(found, m).values()), tables.signed(tables.difference(found, base, m)),
            )]
            + [f"{sum(v) / len(v):.2f}" if v else "–" for v in (last, cosines)]
        )  # fmt: skip
    head = ["data", "rounds", "ISR", "mode", "cloud fraction", "mixing", "last round", "against federated"]
    head += [f"mean of the last {study.TESTS} tests", "against federated", "last a", "mean cosine"]
    return tables.markdown(head, rows)


def main() -> None:
    """Runs what is missing, then shows the table."""
    parser = study.arguments(__doc__, HERE / "results", rounds=60, every=5)
    parser.add_argument("--data", choices=list(MODELS), default="cifar10")
    parser.add_argument("--fractions", type=float, nargs="+", default=[0.1, 0.05, 0.3])
    parser.add_argument("--isr", nargs="+", choices=("off", "on"), default=["off", "on"])
    parser.add_argument("--alpha", type=float, default=0.1)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--lr", type=float, default=0.05)
    study.conduct(parser, "hybrid.jsonl", cases, run, report)


if __name__ == "__main__":
    main()
