"""Four hospitals want one model each that is better than what they can train alone, without showing each other a patient.

    python examples/four_hospitals/simulate.py [FOLDER] [--made-up]

This simulates them in one process, which is the way to find out whether federating is worth it before anyone opens a port; `run.py` beside
it then runs the same four hospitals as real sites. The data are the UCI heart disease records (Detrano et al., 1989), looked for where
FEDLOOM_DATA says, else downloaded; where neither works (or with --made-up), patients are made up.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

import fedloom as fl

# 1. The methods. Training alone is the bar: a hospital that falls below it has no reason to take part.
METHODS = ("local", "fedavg", "fedprox(mu=0.1)", "ditto(lam=0.5)", "fedmap")


def records(made_up: bool = False) -> fl.Federation:
    """The four hospitals, each with its patients cut into training and test rows."""
    if not made_up:
        try:
            return fl.data.load("heart_disease").partition(seed=0)
        except fl.UserError as reason:
            print(f"no heart disease records ({reason}); patients are made up instead")
    draw = np.random.default_rng(0)
    risk = draw.normal(size=13)
    hospitals = {}
    for name, (patients, share, shift) in {
        "cleveland": (303, 0.45, 0.0),
        "hungarian": (294, 0.35, 0.4),
        "switzerland": (123, 0.93, -0.5),
        "va": (200, 0.75, 0.2),
    }.items():
        x = draw.normal(loc=shift, size=(patients, 13)).astype("float32")
        score = x @ (risk + 0.5 * draw.normal(size=13)) + draw.normal(size=patients)
        y = (score > np.quantile(score, 1 - share)).astype("int64")
        cut = patients * 3 // 4
        hospitals[name] = ((x[:cut], y[:cut]), (x[cut:], y[cut:]))
    return fl.Federation.from_arrays(list(hospitals.values()), ids=list(hospitals))


def main(folder: Path, rounds: int = 20, made_up: bool = False) -> Path:
    # 2. Look at the data first: Switzerland has few patients, and nearly all of them are ill.
    data = records(made_up)
    print(data.summary())

    # 3. Every method gets the same rounds, the same network and the same optimiser. A run's folder holds everything about it.
    results = {}
    for method in METHODS:
        results[method] = fl.fit(
            method,
            {"name": "mlp", "hidden": [32]},
            data,
            task="binary",
            rounds=rounds,
            batch_size=16,
            optimizer=fl.sgd(lr=0.05),
            out=folder / method.partition("(")[0],
            progress=False,
        )

    # 4. The average hides what a hospital's board wants to know: do *we* gain?
    print(f"\n{'method':<16} {'mean':>6}   gain of each hospital over training alone")
    for method, result in results.items():
        over = fl.gain(result, results["local"])
        each = "  ".join(f"{name} {value:+.3f}" for name, value in over.clients.items())
        print(f"{method:<16} {result.summary().mean:6.3f}   {each}")

    # 5. A hospital's own model is an ordinary module.
    best = max(results.values(), key=lambda result: result.summary().mean or 0.0)
    print(f"\nSwitzerland's model of {best.config['method']}:\n{best.model('switzerland')}")

    # 6. One page for the meeting: curves, hospital by hospital, who has what, what was sent, how to repeat it.
    page = fl.report([result.path for result in results.values()], folder, title="Heart disease at four hospitals")
    print(f"\nreport: {page}")
    return page


if __name__ == "__main__":
    words = [w for w in sys.argv[1:] if not w.startswith("--")]
    main(Path(words[0]) if words else Path("runs/four-hospitals"), made_up="--made-up" in sys.argv)
