"""fedloom and its peers in turn, in one run on one machine: both workloads, the first round apart, medians of the others.

    python benchmarks/peers/run.py [--rounds 6] [--only pfl fedlab] [--repeats 2]

Tables of one day stand one after another in ``results/peers-DATE.md``. Environments of the peers are made from PyPI when they are not there yet (``.venv/peers``; some gigabytes). A peer that cannot be
installed or run is listed with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PEERS = {"flower": "flower_sim.py", "pfl": "pfl_sim.py", "fedlab": "fedlab_sim.py", "fedjax": "fedjax_sim.py"}
OURS = {"cnn": ("auto", "workers"), "mlp": ("auto", "traced", "compiled")}


def play(words: list[str], limit: float) -> dict[str, Any] | str:
    """What a script reports, or why it does not."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            [sys.executable, *words], capture_output=True, text=True, timeout=limit, env=env, cwd=HERE
        )
    except subprocess.TimeoutExpired:
        return f"took more than {limit:.0f} s"
    lines = [line for line in done.stdout.splitlines() if "RESULT {" in line]
    if not lines:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        wrong = [line for line in said if "Error" in line] or said[-1:] or [f"status {done.returncode}"]
        return wrong[0].strip()[:160]
    return json.loads(lines[-1].partition("RESULT ")[2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=2, help="the fastest median of so many goes is taken of each")
    parser.add_argument("--only", nargs="*", default=list(PEERS), choices=list(PEERS))
    parser.add_argument("--workloads", nargs="*", default=["mlp", "cnn"])
    parser.add_argument("--limit", type=float, default=900.0)
    asked = parser.parse_args()
    before, lines = os.getloadavg()[0], []
    for work in asked.workloads:
        found: dict[str, dict[str, Any] | str] = {}
        ways = [(f"fedloom, {way}", [str(HERE / "fedloom_sim.py"), work, "--way", way]) for way in OURS[work]]
        ways += [(peer, [str(HERE / PEERS[peer]), work]) for peer in asked.only]
        for _ in range(asked.repeats):  # in turn, so that a busy spell does not hit one of them only
            for name, words in ways:
                got = play([*words, "--rounds", str(asked.rounds)], asked.limit)
                old = found.get(name)
                if not isinstance(old, dict) or (isinstance(got, dict) and got["processor"] < old["processor"]):
                    found[name] = got
                print(work, name, got, flush=True)
        ours = [v for k, v in found.items() if k.startswith("fedloom") and isinstance(v, dict)]
        wall, spent = (min((v[key] for v in ours), default=0.0) for key in ("round", "processor"))
        lines += [
            "",
            f"## {work}",
            "",
            "| | first round, s | round, s | against fedloom | processor s | against fedloom | load |",
        ]
        lines.append("|---|---|---|---|---|---|---|")
        for name, got in found.items():
            if isinstance(got, str):
                lines.append(f"| {name} | {got} | | | | | |")
                continue
            numbers = [
                got["first"],
                got["round"],
                got["round"] / wall,
                got["processor"],
                got["processor"] / spent,
                got["load"],
            ]
            lines.append(f"| {name} | " + " | ".join(f"{n:.3g}" for n in numbers) + " |")
    head = [
        f"# Peers, {date.today()}",
        "",
        f"{os.cpu_count()} processors ({platform.machine()}), load average {before:.1f} at the beginning and {os.getloadavg()[0]:.1f}"
        f" at the end (other people's work; a quiet machine has 0). Medians of {asked.rounds} rounds after the first, the better of"
        f" {asked.repeats} goes taken in turn. Processor seconds include worker processes; ratios are to the fastest way of fedloom"
        " (above 1: fedloom is faster). `cnn`: PFLlib's network, 100 clients of 500 CIFAR-shaped pictures, 10 a round, batch 64, SGD,"
        " one epoch. `mlp`: 30-32-16-2, 10 clients of 1,400 rows, batch 32, Adam, five epochs.",
    ]
    text = "\n".join([*head, *lines, ""])
    print(text)
    path = HERE.parent / "results" / f"peers-{date.today()}.md"
    before_it = path.read_text() + "\n" if path.exists() else ""
    path.write_text(before_it + text)


if __name__ == "__main__":
    main()
