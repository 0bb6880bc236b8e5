"""OmniISR on a small task that a CPU can do: where to supervise, with what, under how much skew, and the measured kappa.

    PYTHONPATH=src python -m papers.omniisr.small --part points     # number, spacing, position (Fig. 8, 9, Table VIII)
    PYTHONPATH=src python -m papers.omniisr.small --part terms      # MI, NE, both; weights
    PYTHONPATH=src python -m papers.omniisr.small --part skew       # gain against Dirichlet alpha (RQ2)
    PYTHONPATH=src python -m papers.omniisr.small --part kappa      # H with and without ISR at the same parameters
    PYTHONPATH=src python -m papers.omniisr.small --table

Handwritten digits (8 x 8; ``--data emnist47 --rows 4700`` for a second data set) over 20 clients, Dirichlet 0.1, half of them a round, two local
epochs, SGD; a ConvNet-3 of width 16 has six places to tap. ``MI only`` is a copy of the output loss at the taps, through linear classifiers:
what is called mutual information in the paper is that cross-entropy. Accuracy is that of the shared model on all test rows.
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
POINTS = {
    **{f"{n} points, spacing 1, input": f"isr(points={n}, spacing=1)" for n in (1, 2, 3, 4, 5, 6)},
    **{f"2 points, spacing {s}, input": f"isr(points=2, spacing={s})" for s in (2, 3)},
    "3 points, spacing 2, input": "isr(points=3, spacing=2)",
    **{f"{n} points, spacing 1, {where}": f"isr(points={n}, spacing=1, position='{where}')" for n in (1, 2, 3) for where in ("middle", "output")},
}  # fmt: skip
TERMS = {
    "both": "isr",
    "MI only": "isr(lam=0)",
    "NE only": "isr(alpha=0)",
    "alpha 0.4": "isr(alpha=0.4)",
    "alpha 1": "isr(alpha=1.0)",
    "lambda 0.1": "isr(lam=0.1)",
    "adaptive weights": "isr(weights='adaptive')",
    "alpha 1, adaptive weights": "isr(alpha=1.0, weights='adaptive')",
    "personal adapters": "isr(adapters='personal')",
}
ALPHAS = (0.05, 0.1, 0.3, 1.0, None)


def cases(options: argparse.Namespace) -> Iterator[study.Case]:
    """Seed by seed; the plain run of a seed is its baseline."""
    for seed in options.seeds:
        common = {"data": options.data, "seed": seed, "rounds": options.rounds, "part": options.part}
        common["norm"] = options.norm
        common |= {"rows": options.rows} if options.rows else {}
        if options.part in ("points", "terms"):
            named = POINTS if options.part == "points" else TERMS
            for mode in options.modes:
                for name in ("none", *study.chosen(named, options.only)):
                    text = "" if name == "none" else named[name]
                    yield {"name": name, "isr": text, "mode": mode, "alpha": 0.1, **common}
        elif options.part == "skew":
            for alpha in ALPHAS:
                for name, text in (("none", ""), ("both", "isr")):
                    yield {"name": name, "isr": text, "mode": "federated", "alpha": alpha, **common}
        else:
            for alpha in options.alphas:
                for name in ("none", *study.chosen(TERMS, options.only)):
                    if name != "personal adapters":
                        text = "" if name == "none" else TERMS[name]
                        yield {"name": name, "isr": text, "mode": "federated", "alpha": alpha, **common}


def dealt(images: fl.data.Dataset, alpha: float | None, seed: int) -> fl.Federation:
    """The 20 clients; IID without an alpha."""
    return images.partition(fl.iid() if alpha is None else fl.dirichlet(alpha, min_size=5), clients=20, seed=seed)


def trained(
    data: fl.Federation, isr: str, *, rounds: int, seed: int, mode: str = "federated", norm: str = "gn", **options: Any
) -> fl.Result:
    """FedAvg with ISR as its text says, or without; every experiment on this task trains so."""
    return fl.fit(
        "fedavg" + (f" + {isr}" if isr else ""),
        f"convnet3(width=16, norm='{norm}')",
        data,
        mode=mode,
        rounds=rounds,
        cohort=0.5 if mode == "federated" else 1.0,
        epochs=2 if mode == "federated" else 1,
        batch_size=32,
        optimizer=fl.sgd(0.05),
        seed=seed,
        progress=False,
        **options,
    )


def run(case: study.Case, images: fl.data.Dataset, options: argparse.Namespace) -> dict[str, Any]:
    """One run."""
    kappa = case["part"] == "kappa"
    result = trained(
        dealt(images, case["alpha"], case["seed"]),
        case["isr"],
        rounds=case["rounds"],
        seed=case["seed"],
        mode=case["mode"],
        norm=case["norm"],
        device="cpu",
        diagnostics={"every": 10, "clients": 10, "rows": 64} if kappa else None,
        evaluate={"every": 1 if case["part"] == "skew" else options.every},
    )
    found = study.measured(result)
    if kappa:
        measured = [r["diagnostics"] for r in result.history if "diagnostics" in r]
        for key in (
            "heterogeneity",
            "heterogeneity_relative",
            "kappa",
            "kappa_relative",
            "drift",
            "noise",
            "gradient_norm",
        ):
            found[f"d_{key}"] = [m.get(key) for m in measured]
        found["d_kappa_by_layer"] = measured[-1].get("kappa_by_layer")
        for key in ("kappa", "kappa_relative", "heterogeneity", "heterogeneity_relative", "drift"):
            values = [m[key] for m in measured if m.get(key) is not None]
            if values:
                found[f"mean_{key}"] = statistics.mean(values)
    return found


def report(log: Path) -> str:
    """A table per part, mode and data set."""
    texts = []
    for (data, part, mode, norm), lines in tables.by(study.read(log), "data", "part", "mode", "norm").items():
        rows = []
        groups = tables.by(lines, "alpha", "name")
        for (alpha, name), found in groups.items():
            base = groups.get((alpha, "none"), [])
            row = ["iid" if alpha is None else str(alpha), str(name)]
            row.append(tables.spread(tables.values(found, "global_accuracy").values()))
            row.append("–" if name == "none" else tables.signed(tables.difference(found, base, "global_accuracy")))
            if part == "kappa":
                row += [
                    tables.spread(tables.values(found, f"mean_{k}").values(), 1, 3)
                    for k in ("kappa", "kappa_relative", "heterogeneity")
                ]
            if part == "skew":
                row.append(tables.spread(tables.values(found, "escape_global_accuracy").values(), 1, 1))
            rows.append(row)
        more = {"kappa": ["kappa", "kappa of H / ‖grad‖²", "H"], "skew": ["leaves its plateau in round"]}.get(
            str(part), []
        )
        texts.append(
            f"{data}, {part}, {mode}, normalisation {norm}\n\n"
            + tables.markdown(["alpha", "ISR", "accuracy", "gain", *more], rows)
        )
    return "\n\n".join(texts)


def main() -> None:
    """Runs what is missing, then shows the tables."""
    parser = study.arguments(__doc__, HERE / "results", rounds=30, every=0)
    parser.add_argument("--part", choices=("points", "terms", "skew", "kappa"), default="points")
    parser.add_argument("--data", default="digits")
    parser.add_argument("--alphas", type=float, nargs="+", default=[0.1, 1.0], help="of the part kappa")
    parser.add_argument("--modes", nargs="+", default=["federated", "centralised"], help="of points and terms")
    parser.add_argument("--norm", choices=("gn", "bn_batch", "bn_track", "none"), default="gn")
    study.conduct(parser, "small.jsonl", cases, run, report)


if __name__ == "__main__":
    main()
