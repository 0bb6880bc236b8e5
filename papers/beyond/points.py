"""Where to supervise, chosen from data: a short pilot measures how much clients disagree in each layer, and the taps follow from that.

    PYTHONPATH=src python -m papers.beyond.points                       # digits, on a CPU
    PYTHONPATH=src python -m papers.beyond.points --table

The pilot is ten rounds of FedAvg; the conflict of a layer is the share of pairs of clients whose updates have a negative cosine there (FedLAG's
score), mean over the pilot. Rules: OmniISR's default (three taps from the input side), one tap behind the layer with the most conflict, one behind that
with the least, and both ends of a control: one tap at the input and one at the output, whatever the data say. Training then begins anew; the
pilot's cost is not hidden, "none" is also shown with as many rounds more. Task, network and partition are those of ``papers.omniisr.small``.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fedloom as fl
from fedloom.spec.structure import Structure
from fedloom.spec.taps import candidates, leaves_before
from papers.lib import study, tables
from papers.omniisr import small

HERE = Path(__file__).parent
PILOT = 10
RULES = ("none", "none, pilot's rounds more", "default", "most conflict", "least conflict", "input", "output")


def cases(options: argparse.Namespace) -> Iterator[study.Case]:
    """Seed by seed."""
    for seed in options.seeds:
        for name in study.chosen(RULES, options.only):
            common = {"data": options.data, "alpha": options.alpha, "seed": seed, "rounds": options.rounds}
            yield {"name": name, **common} | ({"rows": options.rows} if options.rows else {})


def own_layers(structure: Structure) -> dict[str, set[str]]:
    """For each tap that has layers of its own before it, those that the taps before do not have."""
    found: dict[str, set[str]] = {}
    known: frozenset[str] = frozenset()
    for tap in candidates(structure):
        here = leaves_before(structure, tap.name)
        mine = {leaf.module for leaf in structure.leaves if leaf.name in here - known}
        if mine:
            found[tap.name] = mine
        known |= here
    return found


def scores(result: fl.Result) -> dict[str, float]:
    """Conflict before each tap, mean over its layers and the pilot's rounds."""
    assert result.run is not None
    rounds = [r["diagnostics"]["conflict"] for r in result.history]
    return {
        tap: statistics.mean(r[layer] for r in rounds for layer in layers if layer in r)
        for tap, layers in own_layers(result.run.bound.structure).items()
    }


def run(case: study.Case, images: fl.data.Dataset, options: argparse.Namespace) -> dict[str, Any]:
    """The pilot where a rule asks for one, then the run."""
    data = small.dealt(images, case["alpha"], case["seed"])

    def fit(isr: str, rounds: int, diagnostics: dict[str, int] | None = None) -> fl.Result:
        options_of = {"device": options.device, "diagnostics": diagnostics, "evaluate": {"every": 0}}
        return small.trained(data, isr, rounds=rounds, seed=case["seed"], **options_of)

    name, rounds, more = case["name"], case["rounds"], {}
    if name in ("most conflict", "least conflict"):
        more["scores"] = scores(fit("", PILOT, {"clients": 2, "rows": 16}))
        more["tap"] = (max if name == "most conflict" else min)(more["scores"], key=more["scores"].__getitem__)
        result = fit(f"isr(points='{more['tap']}')", rounds)
    elif name.startswith("none"):
        result = fit("", rounds + (PILOT if name != "none" else 0))
    else:
        result = fit("isr" if name == "default" else f"isr(points=1, position='{name}')", rounds)
    return study.measured(result) | more


def report(log: Path) -> str:
    """A row per rule: accuracy of the shared model, the paired difference to none, the tap of each seed."""
    texts = []
    for (data, alpha), lines in tables.by(study.read(log), "data", "alpha").items():
        groups = tables.by(lines, "name")
        rows = []
        for (name,), found in groups.items():
            gain = tables.signed(tables.difference(found, groups.get(("none",), []), "global_accuracy"))
            chosen = [x["found"]["tap"] for x in sorted(found, key=lambda x: x["case"]["seed"]) if "tap" in x["found"]]
            accuracy = tables.spread(tables.values(found, "global_accuracy").values())
            rows.append([str(name), accuracy, "–" if name == "none" else gain, ", ".join(chosen) or "–"])
        head = ["taps", "accuracy", "against none", "chosen, seed by seed"]
        texts.append(f"{data}, Dirichlet {alpha}\n\n{tables.markdown(head, rows)}")
    return "\n\n".join(texts)


def main() -> None:
    """Runs what is missing, then shows the table."""
    parser = study.arguments(__doc__, HERE / "results", rounds=30)
    parser.add_argument("--data", default="digits")
    parser.add_argument("--alpha", type=float, default=0.1)
    study.conduct(parser, "points.jsonl", cases, run, report)


if __name__ == "__main__":
    main()
