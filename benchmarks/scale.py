"""What a run costs as the population grows: round time, host memory, start-up; and LAG's analysis at 1,000 clients.

Each population runs in a process of its own, so that its memory is its own. Clients keep a personal head (fedper), 100 of them take
part in a round. Start-up is from the arrays in memory to the beginning of round one, federation included. A round is the time
from one record to the next: training, aggregation, what clients keep, and its share of checkpoints.

    python benchmarks/scale.py                   # the curve
    python benchmarks/scale.py --store 100000    # what all clients of a population keep, on disk
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
POPULATIONS = (100, 1_000, 10_000, 100_000)
ROWS, TESTED, WIDTH, HIDDEN, CLASSES, COHORT = 40, 8, 64, 256, 10, 100


def resident() -> float:
    """Memory of this process in MiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def peak_resident() -> float:
    """Largest memory of this process in MiB.

    Not ``ru_maxrss``: after a fork it starts at the memory of the parent.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024


def population(clients: int, rounds: int) -> dict[str, float]:
    """One run; times of rounds, memory, start-up."""
    import numpy as np
    import torch

    import fedloom as fl

    torch.set_num_threads(1)
    draw = np.random.default_rng(0)
    x = draw.standard_normal((clients * ROWS, WIDTH), dtype=np.float32)
    y = x[:, :CLASSES].argmax(1)
    owner = np.repeat(np.arange(clients), ROWS)
    split = np.tile(np.array(["train"] * (ROWS - TESTED) + ["test"] * TESTED), clients)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, CLASSES))
    marks: list[tuple[float, float, float]] = []

    def note(record: dict[str, float]) -> bool:
        marks.append((time.perf_counter(), time.process_time(), record["seconds"]))
        return False

    with tempfile.TemporaryDirectory() as folder:
        begun, spent = time.perf_counter(), time.process_time()
        data = fl.Federation.from_rows((x, y), owner, split=split)
        fl.fit(
            "fedper",
            model,
            data,
            rounds=rounds,
            cohort=COHORT,
            epochs=2,
            batch_size=16,
            engine="vectorised",
            evaluate={"every": 0},
            callbacks=[note],
            progress=False,
            out=Path(folder) / "run",
        )
        ended = time.perf_counter()
    first = marks[0]
    # The first rounds trace their steps; the last one ends with the evaluation of everybody.
    walls = [b[0] - a[0] for a, b in itertools.pairwise(marks[3:-1])]
    works = [b[1] - a[1] for a, b in itertools.pairwise(marks[3:-1])]
    return {
        "clients": clients,
        "start": first[0] - begun - first[2],
        "start_processor": first[1] - spent,
        "round": statistics.median(walls),
        "round_processor": statistics.median(works),
        "round_quartile": statistics.quantiles(works, n=4)[0],
        "end": ended - marks[-2][0],
        "memory": resident(),
        "peak": peak_resident(),
    }


def store(clients: int) -> dict[str, float]:
    """States of every client of a population (a head of 512 x 10) put into the store and read again."""
    import numpy as np
    import torch

    from fedloom.clients.states import ClientState
    from fedloom.store.client_store import ClientStore

    before = resident()
    with tempfile.TemporaryDirectory() as folder:
        kept = ClientStore(Path(folder))
        begun = time.perf_counter()
        for i in range(clients):
            kept[str(i)] = ClientState({"w": torch.full((10, 512), float(i)), "b": torch.full((10,), float(i))}, {}, 1)
            if i % 1000 == 999:
                kept.mark()
        kept.flush()
        written = time.perf_counter() - begun
        picked = np.random.default_rng(0).choice(clients, size=min(clients, 2000), replace=False)
        begun = time.perf_counter()
        for i in picked:
            assert float(kept[str(i)].leaves["w"][3, 7]) == float(i)
        read = (time.perf_counter() - begun) / len(picked)
        size = sum(p.stat().st_size for p in Path(folder).iterdir())
        return {"clients": clients, "GB": size / 1e9, "MB_per_s": size / 1e6 / written, "read_us": read * 1e6} | {
            "memory": resident() - before
        }


def lag(clients: int) -> dict[str, float]:
    """LAG's score of one layer: every pair by hand, and as a matrix product."""
    import torch

    from fedloom.ops.gram import gram
    from fedloom.plugins.lag import conflicts

    torch.set_num_threads(1)
    updates = torch.randn(clients, 512, 64, generator=torch.Generator().manual_seed(0))
    begun = time.perf_counter()
    found = int(conflicts(gram([updates]), 0.0))
    product = time.perf_counter() - begun
    flat = updates.reshape(clients, -1).double()
    some = list(itertools.islice(itertools.combinations(range(clients), 2), 2000))
    begun = time.perf_counter()
    for u, v in some:
        torch.nn.functional.cosine_similarity(flat[u], flat[v], dim=0)
    pair = (time.perf_counter() - begun) / len(some)
    return {"clients": clients, "conflicts": found, "product": product, "pairs": pair * clients * (clients - 1) / 2}


def apart(*words: str) -> dict[str, float]:
    """This script in a process of its own."""
    made = subprocess.run(
        [sys.executable, __file__, *words], env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    if made.returncode:
        raise SystemExit(made.stderr)
    return json.loads(made.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", type=int)
    parser.add_argument("--store", type=int)
    parser.add_argument("--lag", type=int)
    parser.add_argument("--rounds", type=int, default=40)
    asked = parser.parse_args()
    if asked.one or asked.store or asked.lag:
        found = (
            population(asked.one, asked.rounds) if asked.one else store(asked.store) if asked.store else lag(asked.lag)
        )
        print(json.dumps(found))
        return
    load = os.getloadavg()[0]
    lines = [
        f"# Scale, {date.today()}",
        "",
        f"{os.cpu_count()} processors ({platform.machine()}), load average {load:.1f} at the beginning, one thread. `fedper`, network"
        f" {WIDTH}-{HIDDEN}-{CLASSES}, {ROWS - TESTED} training rows a client, {COHORT} clients a round, 2 epochs, batch 16, with a run"
        f" folder (checkpoints). Medians of {asked.rounds - 5} rounds; processor time is what a busy machine disturbs least.",
        "",
        "| clients | start-up, s | processor s to the end of round one | round, s | round, processor s | against 100 clients | memory, MiB | peak, MiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    base = None
    for clients in POPULATIONS:
        row = apart("--one", str(clients), "--rounds", str(asked.rounds))
        base = base or row["round_processor"]
        lines.append(
            f"| {clients:,} | {row['start']:.1f} | {row['start_processor']:.1f} | {row['round']:.4f} | {row['round_processor']:.4f}"
            f" | {row['round_processor'] / base - 1:+.1%} | {row['memory']:.0f} | {row['peak']:.0f} |"
        )
        print(lines[-1], flush=True)
    kept, scores = apart("--store", "100000"), apart("--lag", "1000")
    lines += [
        "",
        f"The store alone: {kept['clients']:,} clients that each keep a head of 512 x 10 are {kept['GB']:.2f} GB on disk; written at"
        f" {kept['MB_per_s']:.0f} MB/s, one client read in {kept['read_us']:.0f} microseconds, memory grows by {kept['memory']:.0f} MiB.",
        "",
        f"LAG's score of one layer (512 x 64) at {scores['clients']:,} clients: {scores['product']:.2f} s as a matrix product,"
        f" {scores['pairs']:.0f} s pair by pair (from 2,000 of {int(scores['clients'] * (scores['clients'] - 1) / 2):,} pairs).",
        "",
    ]
    text = "\n".join(lines)
    print(text)
    (RESULTS / f"scale-{date.today()}.md").write_text(text)


if __name__ == "__main__":
    main()
