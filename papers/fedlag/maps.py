"""FedLAG's toy set (Fig. 2a) and maps of conflict by layer and round (Figs. 2b, 12 to 15), IID against label skew.

    PYTHONPATH=src python -m papers.fedlag.maps --part toy
    PYTHONPATH=src python -m papers.fedlag.maps --part maps --figures DIR
    PYTHONPATH=src python -m papers.fedlag.maps --table

Toy: two classes split by y = 0; four users at x = -6, -2, 2, 6, half of whose rows are "noisy": labelled by the side of x at which they lie, left
and right in turn, so that local boundaries are orthogonal to the global one (the published coordinates are not known; these follow appendix
G). A network of one layer and three parameters. Maps: FedAvg with scores recorded (``lag(k=0)``), 10 users, one local epoch: MNIST (3,000 rows)
with the 100-unit MLP and with a CNN. A cell is the share of pairs of users whose updates of a layer have a negative cosine.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

import fedloom as fl
from papers.lib import study, tables

HERE = Path(__file__).parent
NETWORKS = {"mlp": "mlp(hidden=(100,))", "cnn": "pfllib_cnn", "cnn20": "cnn20"}


def users(seed: int, iid: bool, rows: int = 200) -> fl.Federation:
    """Four users of the toy set; with ``iid`` their rows are shuffled among them."""
    draw = np.random.default_rng(seed)
    xs, ys = [], []
    for k, centre in enumerate((-6.0, -2.0, 2.0, 6.0)):
        above = draw.random(rows) < 0.5
        x = np.stack([centre + draw.uniform(-2, 2, rows), np.where(above, 1, -1) * draw.uniform(0.3, 3, rows)], 1)
        noisy = draw.random(rows) < 0.5
        sides = (x[:, 0] > centre) if k % 2 == 0 else (x[:, 0] < centre)
        # The global boundary stays y = 0: noisy rows lie on it.
        x[noisy, 1] = draw.uniform(-0.3, 0.3, noisy.sum())
        xs.append(x.astype(np.float32))
        ys.append(np.where(noisy, sides, above).astype(np.int64))
    if iid:
        order = draw.permutation(4 * rows)
        xs, ys = (np.split(np.concatenate(v)[order], 4) for v in (xs, ys))
    return fl.Federation.from_arrays([((x, y), (x, y)) for x, y in zip(xs, ys, strict=True)])


def cases(options: argparse.Namespace) -> Iterator[study.Case]:
    """Seed by seed, IID and skewed next to each other."""
    for seed in options.seeds:
        for setting in ("skewed", "iid"):
            if options.part == "toy":
                yield {"part": "toy", "setting": setting, "seed": seed, "rounds": 30}
            else:
                for network in options.networks:
                    yield {"part": "maps", "data": options.data, "network": network, "setting": setting, "seed": seed,
                           "rounds": options.rounds, "rows": options.rows or 3000}  # fmt: skip


def run(case: study.Case, images: fl.data.Dataset | None, options: argparse.Namespace) -> dict[str, Any]:
    """One run of FedAvg."""
    if case["part"] == "toy":
        return toy(case)
    assert images is not None
    rule = fl.iid() if case["setting"] == "iid" else fl.dirichlet(0.1)
    result = fl.fit(
        "fedavg('uniform') + lag(k=0)",
        NETWORKS[case["network"]],
        images.partition(rule, clients=10, seed=case["seed"]),
        rounds=case["rounds"],
        batch_size=32,
        optimizer=fl.sgd(0.05),
        seed=case["seed"],
        device=options.device,
        evaluate={"every": 0},
        progress=False,
    )
    scores = [{k: v / 45 for k, v in r["lag"]["score"].items()} for r in result.history]
    found = study.measured(result)
    found["map"] = scores
    for at, name in enumerate(scores[0]):
        found[f"layer {at + 1}"] = statistics.mean(s[name] for s in scores)
    found["first"], found["last"] = found["layer 1"], found[f"layer {len(scores[0])}"]
    found["all"] = statistics.mean(v for s in scores for v in s.values())
    return found


def toy(case: study.Case) -> dict[str, Any]:
    """Cosines of the four users' updates, and where the boundary ends."""
    result = fl.fit(
        "fedavg('uniform')",
        lambda: nn.Linear(2, 1),
        users(case["seed"], case["setting"] == "iid"),
        task="binary",
        rounds=case["rounds"],
        batch_size=50,
        optimizer=fl.sgd(0.05),
        seed=case["seed"],
        device="cpu",
        diagnostics={},
        progress=False,
    )
    measured = [r["diagnostics"] for r in result.history]
    weight = result.model().weight.detach()[0]
    return {
        "conflict": statistics.mean(m["conflict"][""] for m in measured),
        "cosine": statistics.mean(m["cosine"][""] for m in measured),
        "tilt": float(abs(weight[0]) / abs(weight[1])),
        "global_accuracy": result.history[-1]["global_accuracy"],
        "heterogeneity_relative": statistics.median(m["heterogeneity_relative"] for m in measured),
    }


def report(log: Path) -> str:
    """Both parts."""
    lines = study.read(log)
    texts = []
    shown = [x for x in lines if x["case"]["part"] == "toy"]
    if shown:
        rows = [
            [str(setting), *(tables.spread(tables.values(found, m).values(), 1, 3) for m in ("conflict", "cosine", "tilt", "global_accuracy"))]
            for (setting,), found in tables.by(shown, "setting").items()
        ]  # fmt: skip
        texts.append(
            tables.markdown(["toy set", "conflicting pairs", "mean cosine", "size of w1 / w2", "accuracy"], rows)
        )
    shown = [x for x in lines if x["case"]["part"] == "maps"]
    if shown:
        depth = max(sum(k.startswith("layer ") for k in x["found"]) for x in shown)
        rows = [
            [str(data), str(network), str(setting), *(tables.spread(tables.values(found, f"layer {i + 1}").values(), 1) for i in range(depth))]
            for (data, network, setting), found in tables.by(shown, "data", "network", "setting").items()
        ]  # fmt: skip
        texts.append(tables.markdown(["data", "network", "setting", *(f"layer {i + 1}" for i in range(depth))], rows))
    return "\n\n".join(texts)


def figures(log: Path, folder: Path) -> None:
    """A map per network and setting, of the first seed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    for line in study.read(log):
        case = line["case"]
        if case["part"] == "maps" and case["seed"] == 0:
            scores = line["found"]["map"]
            figure, axis = plt.subplots(figsize=(7, 2 + 0.2 * len(scores[0])))
            drawn = axis.imshow(
                [[s[k] for s in scores] for k in scores[0]], vmin=0, vmax=1, aspect="auto", cmap="viridis"
            )
            axis.set_yticks(range(len(scores[0])), list(scores[0]))
            axis.set_xlabel("round")
            axis.set_title(f"{case['data']}, {case['network']}, {case['setting']}: share of conflicting pairs")
            figure.colorbar(drawn)
            name = f"conflict_{case['data']}_{case['network']}_{case['setting']}.png"
            figure.savefig(folder / name, dpi=110, bbox_inches="tight")
            plt.close(figure)


def main() -> None:
    """Runs what is missing, then shows the tables."""
    parser = study.arguments(__doc__, HERE / "results", rounds=15)
    parser.add_argument("--part", choices=("toy", "maps"), default="toy")
    parser.add_argument("--data", default="mnist")
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=["mlp", "cnn"])
    parser.add_argument("--figures", type=Path)
    options = parser.parse_args()
    log = options.out / "maps.jsonl"
    if not options.table:
        images = None
        if options.part == "maps":
            images = study.shrunk(fl.data.load(options.data, data_dir=options.data_dir), options.rows or 3000)
        study.play(cases(options), lambda case: run(case, images, options), log, options)
    print(report(log))
    if options.figures:
        figures(log, options.figures)


if __name__ == "__main__":
    main()
