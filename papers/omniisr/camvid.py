"""OmniISR on CamVid: three networks, centralised and federated, with and without ISR, and the gap between the two modes.

    PYTHONPATH=src python -m papers.omniisr.camvid --device cuda --seeds 0 1 2 --stop-after 540
    PYTHONPATH=src python -m papers.omniisr.camvid --device cuda --part ablation --stop-after 540
    PYTHONPATH=src python -m papers.omniisr.camvid --table

Frames of 240 x 180, the official split (367 training and 233 test frames, which separates neighbouring frames; the paper's random 600/101
does not). Clients: the three recordings, or nine contiguous pieces of them. Twelve rounds of two local epochs, Adam, batch 8, flips and scaling; a
centralised run makes as many epochs in all and keeps its optimiser. All metrics are of the shared model on all official test frames. The
paper states neither learning rate nor rounds, clients, resolution, alpha, lambda nor the taps: levels cannot be compared, signs can.
"""

from __future__ import annotations

import argparse
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any

import fedloom as fl
from papers.lib import study, tables

HERE = Path(__file__).parent
NETWORKS = ("deeplabv3plus_resnet18", "topformer_t", "seaformer_t")
SETTINGS = {"centralised": None, "recordings": 3, "nine pieces": 9}
METRICS = {"mIoU": "global_miou", "mF1": "global_mf1", "mPre": "global_mprecision", "mRec": "global_mrecall"}
PUBLISHED = {  # Table III, CamVid: mIoU, mF1, mPre, mRec; centralised and federated, without and with ISR
    "deeplabv3plus_resnet18": (
        (76.02, 82.43, 83.07, 82.46), (76.13, 82.52, 83.09, 82.57), (72.78, 80.24, 81.33, 79.47), (73.24, 80.70, 81.60, 80.34),
    ),
    "topformer_t": (
        (63.10, 70.22, 71.88, 70.25), (66.38, 74.50, 77.47, 73.60), (56.60, 63.21, 71.66, 63.26), (58.85, 66.20, 72.02, 65.20),
    ),
    "seaformer_t": (
        (50.69, 56.00, 55.40, 56.89), (55.83, 62.39, 64.19, 62.54), (47.08, 53.39, 53.86, 53.91), (51.54, 59.40, 60.07, 60.36),
    ),
}  # fmt: skip
TABLE_IV = {"centralised": (1.76, 4.04), "recordings": (2.03, 6.06)}  # three networks on three data sets
ABLATION = {
    "3 points, spacing 2, input": "isr",
    "1 point": "isr(points=1, spacing=1)",
    "2 points": "isr(points=2, spacing=1)",
    "3 points": "isr(points=3, spacing=1)",
    "4 points": "isr(points=4, spacing=1)",
    "5 points": "isr(points=5, spacing=1)",
    "2 points, spacing 2": "isr(points=2, spacing=2)",
    "2 points, spacing 3": "isr(points=2, spacing=3)",
    "2 points, middle": "isr(points=2, spacing=1, position='middle')",
    "2 points, output": "isr(points=2, spacing=1, position='output')",
    "MI only": "isr(lam=0)",
    "NE only": "isr(alpha=0)",
    "alpha 0.05": "isr(alpha=0.05)",
    "alpha 0.4": "isr(alpha=0.4)",
}


def cases(options: argparse.Namespace) -> Iterator[study.Case]:
    """Seed by seed; in each the networks in turn, plain and with ISR next to each other."""
    common = {k: getattr(options, k) for k in ("rounds", "epochs", "lr", "batch", "precision")}
    common |= {"rows": options.rows} if options.rows else {}
    for seed in options.seeds:
        if options.part == "table":
            for setting in options.settings:
                for network in options.networks:
                    for isr in ("none", "isr"):
                        yield {"network": network, "setting": setting, "isr": isr, "seed": seed, **common}
        else:
            (network,) = options.networks[:1]
            for setting in [s for s in options.settings if s != "nine pieces"]:
                for name in ("none", *study.chosen(ABLATION, options.only)):
                    yield {"network": network, "setting": setting, "isr": name, "seed": seed, **common}


def run(case: study.Case, scenes: fl.data.Dataset, options: argparse.Namespace) -> dict[str, Any]:
    """One network in one setting."""
    clients = SETTINGS[case["setting"]]
    parted = (
        scenes.partition(fl.chunks(), clients=clients, seed=case["seed"])
        if clients == 9
        else scenes.partition(fl.natural(), seed=case["seed"])
    )
    plug_in = {"none": "", "isr": " + isr"}.get(case["isr"]) if case["isr"] in ("none", "isr") else None
    method = "fedavg" + (f" + {ABLATION[case['isr']]}" if plug_in is None else plug_in)
    result = fl.fit(
        method,
        case["network"],
        parted,
        mode="centralised" if clients is None else "federated",
        task="segmentation",
        rounds=case["rounds"],
        epochs=case["epochs"],
        batch_size=case["batch"],
        optimizer=fl.adam(case["lr"], weight_decay=1e-4, decay=options.decay),
        augment={"flip": 0.5, "scale": (0.75, 1.5)},
        seed=case["seed"],
        engine=study.engine(options),
        device=options.device,
        precision=case["precision"],
        evaluate={"every": options.every},
        progress=False,
    )
    return study.measured(result, "miou")


def report(log: Path) -> str:
    """For each number of rounds the table of levels and gains, and the gap between centralised and federated training."""
    texts = []
    for (rounds, epochs), lines in tables.by(study.read(log), "rounds", "epochs").items():
        groups = tables.by(lines, "network", "setting", "isr")
        texts.append(f"{rounds} rounds of {epochs} epochs\n\n{levels(groups)}")
        gaps = between(groups)
        if gaps:
            head = ["network", "clients", "gap without ISR", "gap with ISR", "change"]
            texts.append(tables.markdown(head, gaps))
        means = summary(groups)
        if means:
            head = [
                "three networks",
                "mean gain, mIoU",
                "in per cent of the level",
                "published, CamVid",
                "Table IV, three data sets",
            ]
            texts.append(tables.markdown(head, means))
    return "\n\n".join(texts)


def levels(groups: dict[tuple[Hashable, ...], list[dict[str, Any]]]) -> str:
    """All metrics, and the paired gain of ISR."""
    rows = []
    order = (*NETWORKS, *SETTINGS, "none", "isr", *ABLATION)
    for (network, setting, isr), lines in sorted(groups.items(), key=lambda g: [order.index(str(k)) for k in g[0]]):
        base = groups.get((network, setting, "none"), [])
        row = [str(network), str(setting), str(isr)]
        row += [tables.spread(tables.values(lines, m).values()) for m in METRICS.values()]
        gain = "–" if isr == "none" else tables.signed(tables.difference(lines, base, "global_miou"))
        kept = isr if isr in ("none", "isr") else None
        paper = PUBLISHED[str(network)] if kept else None
        at = (0 if setting == "centralised" else 2) + (kept == "isr")
        beside = " / ".join(f"{v:.1f}" for v in paper[at]) if paper and setting != "nine pieces" else "–"
        rows.append([*row, gain, beside])
    return tables.markdown(
        ["network", "setting", "ISR", *METRICS, "gain of ISR, mIoU", "published, in this order"], rows
    )


def summary(groups: dict[tuple[Hashable, ...], list[dict[str, Any]]]) -> list[list[str]]:
    """Table IV: the mean gain in mIoU over the networks, in points and as a share, seed by seed."""
    rows = []
    for setting in SETTINGS:
        points, shares = [], []
        for seed in sorted({x["case"]["seed"] for (_, s, _), found in groups.items() if s == setting for x in found}):
            pairs = []
            for network in NETWORKS:
                plain, ours = (
                    tables.values(groups.get((network, setting, isr), []), "global_miou").get(seed)
                    for isr in ("none", "isr")
                )
                if plain is not None and ours is not None:
                    pairs.append((plain, ours))
            if len(pairs) == len(NETWORKS):
                points.append(sum(b - a for a, b in pairs) / len(pairs))
                shares.append(sum(b / a - 1 for a, b in pairs) / len(pairs))
        at = 0 if setting == "centralised" else 2
        levels = [(paper[at][0], paper[at + 1][0]) for paper in PUBLISHED.values()]
        there = f"{sum(b - a for a, b in levels) / 3:+.2f}, {sum(100 * (b / a - 1) for a, b in levels) / 3:+.1f} %"
        if points and setting in TABLE_IV:
            paper = [there, "{:+.2f}, {:+.2f} %".format(*TABLE_IV[setting])]
        else:
            paper = ["–", "–"]
        if points:
            rows.append([setting, tables.signed(points), tables.signed(shares), *paper])
    return rows


def between(groups: dict[tuple[Hashable, ...], list[dict[str, Any]]]) -> list[list[str]]:
    """By how much centralised training is ahead, and what ISR changes of it."""
    gaps = []
    for network in dict.fromkeys(k[0] for k in groups):
        for setting in ("recordings", "nine pieces"):
            pair = []
            for isr in ("none", "isr"):
                centre, sites = (groups.get((network, s, isr), []) for s in ("centralised", setting))
                pair.append(tables.difference(centre, sites, "global_miou"))
            if all(pair):
                change = [b - a for a, b in zip(*pair, strict=False)]
                gaps.append([str(network), setting, *(tables.signed(p) for p in pair), tables.signed(change)])
    return gaps


def main() -> None:
    """Runs what is missing, then shows the table."""
    parser = study.arguments(__doc__, HERE / "results", rounds=12, every=6)
    parser.add_argument("--part", choices=("table", "ablation"), default="table")
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS))
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--decay", type=float, default=0.95, help="of the learning rate, per round")
    options = parser.parse_args()
    log = options.out / ("camvid.jsonl" if options.part == "table" else "camvid_ablation.jsonl")
    if not options.table:
        scenes = study.shrunk(fl.data.load("camvid", data_dir=options.data_dir), options.rows)
        study.play(cases(options), lambda case: run(case, scenes, options), log, options)
    print(report(log))


if __name__ == "__main__":
    main()
