"""Four hospitals want one model each that is better than what they can train alone, without showing each other a patient.

    python examples/four_hospitals/simulate.py [FOLDER] [--made-up]

This simulates them in one process, which is the way to find out whether federating is worth it before anyone opens a port; `run.py` beside
it then runs the same four hospitals as real sites. The data are the UCI heart disease records (Detrano et al., 1989), looked for where
FEDLOOM_DATA says, else downloaded; where neither works (or with --made-up), patients are made up.

Methods and epochs were chosen by looking at cuts 0 to 2 (nine methods with 1 epoch, seven of them with 3), so this shows other cuts. On cuts 3
to 8 accuracy gains next to nothing over training alone (fedper +0.004, fedmap 0.000), AUC a little (fedper +0.026, better in 4 of 6 cuts; fedmap
+0.017, in 6 of 6).
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import mean

import numpy as np

import fedloom as fl

# 1. The methods. Training alone is the bar: a hospital that falls below it has no reason to take part.
METHODS = ("local", "fedavg", "fedper", "ditto(lam=0.5)", "fedmap")


# Cuts before this one were used to choose; what is chosen on test rows must not be judged by them.
FIRST = 3


def records(cut: int, made_up: bool = False) -> fl.Federation:
    """The four hospitals; each cuts its patients into training and test rows, anew for every cut."""
    if not made_up:
        try:
            return fl.data.load("heart_disease").partition(seed=cut)
        except fl.UserError as reason:
            print(f"no heart disease records ({reason}); patients are made up instead")
    draw = np.random.default_rng(cut)
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


def main(folder: Path, rounds: int = 20, cuts: int = 6, made_up: bool = False) -> Path:
    # 2. Look at the data first: Switzerland has few patients, and nearly all of them are ill.
    print(records(FIRST, made_up).summary())

    # 3. Every method gets the same rounds, network and optimiser. Test sets are small, so all is done for several cuts of the patients
    #    into training and test rows. A run's folder holds everything about it.
    results: dict[str, list[fl.Result]] = {method: [] for method in METHODS}
    for cut in range(FIRST, FIRST + cuts):
        data = records(cut, made_up)
        for method in METHODS:
            result = fl.fit(
                method,
                {"name": "mlp", "hidden": [32]},
                data,
                task="binary",
                rounds=rounds,
                epochs=3,
                batch_size=16,
                optimizer=fl.sgd(lr=0.05),
                seed=cut,
                out=folder / f"{method.partition('(')[0]}-{cut}",
                progress=False,
            )
            results[method].append(result)

    # 4. The average hides what a hospital's board wants to know: do *we* gain? Accuracy mostly tells how ill the patients of a hospital are
    #    (a model that calls every Swiss patient ill is right nine times in ten); AUC tells whether the ill are ranked above the healthy.
    for metric in ("accuracy", "auc"):
        print(f"\n{metric:<16} {'mean':>6}   less training alone")
        alone = by_hospital(results["local"], metric)
        for method, runs in results.items():
            mine = by_hospital(runs, metric)
            each = "  ".join(f"{name} {mine[name] - alone[name]:+.3f}" for name in mine)
            print(f"{method:<16} {mean(mine.values()):6.3f}   {each}")

    # 5. A hospital's own model is an ordinary module.
    print(f"\nSwitzerland's own model:\n{results['fedmap'][0].model('switzerland')}")

    # 6. One page for the meeting: curves, hospital by hospital, who has what, what was sent, how to repeat it.
    paths = [result.path for runs in results.values() for result in runs]
    page = fl.report(paths, folder, title="Heart disease at four hospitals")
    print(f"\nreport: {page}")
    return page


def by_hospital(runs: list[fl.Result], metric: str) -> dict[str, float]:
    """The mean over cuts of a metric of each hospital's own model on its own test rows."""
    found: dict[str, list[float]] = {}
    for run in runs:
        for name, hospital in run.clients.items():
            if hospital.metrics[metric] is not None:  # a test set without a healthy patient has no AUC
                found.setdefault(name, []).append(hospital.metrics[metric])
    return {name: mean(values) for name, values in found.items()}


if __name__ == "__main__":
    words = [w for w in sys.argv[1:] if not w.startswith("--")]
    main(Path(words[0]) if words else Path("runs/four-hospitals"), made_up="--made-up" in sys.argv)
