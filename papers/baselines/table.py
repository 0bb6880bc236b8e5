"""Every method of the package on digits and EMNIST-47, under label skew: the sanity table.

    FEDLOOM_DATA=... python papers/baselines/table.py --jobs 16                # learning rates, then the cells, what is missing of them
    python papers/baselines/table.py --table                                   # writes table.md from results/*.jsonl

A cell is one (data, alpha, seed, method); cells run in `--jobs` processes of one thread each, and each finished one is a line of
``results/cells.jsonl``. The client's learning rate of each method and data set is the best of ``RATES`` on seed 100 and alpha 0.1
(``results/tuning.jsonl``), never on the reported seeds; other hyper-parameters are the methods' defaults but for those in ``TEXT``.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: one thread per process

import torch

import fedloom as fl

HERE = Path(__file__).parent
CLIENTS, ALPHAS, SEEDS = 20, (0.1, 0.3), (0, 1, 2)
RATES, TUNING_SEED, TUNING_ALPHA = (0.02, 0.1, 0.3), 100, 0.1
KEY = ("data", "alpha", "seed", "method", "lr", "text")
PER_CLASS, PER_CLASS_TEST = 150, 60  # of EMNIST-47: 7,050 of 35,250 training rows, 2,820 of 7,050 test rows


@dataclass(frozen=True)
class Setting:
    """How one data set is trained."""

    model: Callable[[], torch.nn.Module]
    rounds: int
    epochs: int
    batch_size: int


SETTINGS = {
    "digits": Setting(partial(fl.models.mlp, in_features=64, num_classes=10, hidden=(64, 32)), 40, 2, 16),
    "emnist47": Setting(
        partial(fl.models.mlp, in_features=784, num_classes=47, hidden=(64, 64), norm="bn_track"), 30, 2, 32
    ),
}

GLOBAL = (
    "fedavg", "fedprox", "scaffold", "fedavgm", "fedadam", "fedyogi", "fedexp", "fednova", "qfedavg", "feddyn", "fedntd", "moon",
    "fedintr", "fedir", "balancefl", "fedgau", "omniisr", "fedaf",
)  # fmt: skip
# What differs from the defaults. Numbers of rounds are scaled from the papers' runs to these; the last four were chosen like the
# learning rates, on seed 100 (README.md has the trials).
TEXT = {
    "fedavg_then_local": "fedavg_then_local(rounds={half})",
    "fedcac": "fedcac(beta={rounds})",
    "fedlag": "fedlag(k=1)",
    "pfedme": "pfedme(lam=1.0, eta=1.0)",
    "peravg": "peravg(a=0.1)",
    "feddbe": "feddbe(kappa=1.0)",
    "fedbabu": "fedbabu(finetune_epochs=20)",
}

# FedAF's clients make 100 steps on pictures a round and its server trains to convergence: few rounds, each as dear as ten of FedAvg's.
ROUNDS = {("digits", "fedaf"): 4, ("emnist47", "fedaf"): 3}


@dataclass(frozen=True)
class Cell:
    """One run of the table."""

    data: str
    alpha: float
    seed: int
    method: str
    lr: float

    @property
    def key(self) -> tuple[object, ...]:
        return (self.data, self.alpha, self.seed, self.method, self.lr, self.text)

    @property
    def rounds(self) -> int:
        return ROUNDS.get((self.data, self.method), SETTINGS[self.data].rounds)

    @property
    def text(self) -> str:
        rounds = self.rounds
        return TEXT.get(self.method, self.method).format(rounds=rounds, half=rounds // 2)


# Running --------------------------------------------------------------------------------------------------


@cache
def images(data: str, data_dir: str | None) -> fl.data.Dataset:
    """The data set; of EMNIST-47 the first rows of each class."""
    if data == "digits":
        return fl.data.load("digits")
    found = fl.data.load(data, data_dir=data_dir)
    assert found.test is not None
    return replace(found, train=first(found.train, PER_CLASS), test=first(found.test, PER_CLASS_TEST))


def first(rows: fl.data.Rows, count: int) -> fl.data.Rows:
    """The first rows of each class."""
    hot = rows.y[:, None] == torch.arange(int(rows.y.max()) + 1)
    place = (hot.long().cumsum(0) * hot.long()).sum(1)
    return rows.take(torch.nonzero(place <= count)[:, 0])


def run(cell: Cell, device: str, data_dir: str | None) -> dict[str, Any]:
    """One method on one partition."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    setting, started, cpu = SETTINGS[cell.data], time.perf_counter(), time.process_time()
    federation = images(cell.data, data_dir).partition(fl.dirichlet(cell.alpha), clients=CLIENTS, seed=cell.seed)
    line: dict[str, Any] = dict(zip(KEY, cell.key, strict=True))
    try:
        result = fl.fit(
            cell.text,
            setting.model,
            federation,
            rounds=cell.rounds,
            epochs=setting.epochs,
            batch_size=setting.batch_size,
            optimizer=fl.sgd(lr=cell.lr),
            seed=cell.seed,
            device=device,
            evaluate={"every": 10},
            progress=False,
        )
    except (
        Exception
    ) as error:  # such as a rate at which a method leaves the numbers: a result too, and the others go on
        return line | {
            "failed": f"{type(error).__name__}: {error}",
            "accuracy": 0.0,
            "wall": time.perf_counter() - started,
        }
    last = result.history[-1]
    kept = ("accuracy", "accuracy_std", "accuracy_worst10", "accuracy_weighted", "global_accuracy")
    return line | {
        "rounds": cell.rounds,
        **{k: last.get(k) for k in kept},
        "bytes_up": sum(r.get("bytes_up") or 0 for r in result.history),
        "bytes_down": sum(r.get("bytes_down") or 0 for r in result.history),
        "seconds": sum(r["seconds"] for r in result.history),
        "wall": time.perf_counter() - started,
        "cpu": time.process_time() - cpu,
        "curve": [(r["round"], r["accuracy"]) for r in result.history if r.get("accuracy") is not None],
        "device": device,
        "torch": torch.__version__,
        "fedloom": fl.__version__,
    }


def lines(path: Path) -> list[dict[str, Any]]:
    """What a file of finished cells holds; a line that was cut off by a kill is left out."""
    found = []
    for text in path.read_text().splitlines() if path.exists() else []:
        try:
            found.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return found


def run_all(cells: list[Cell], log: Path, options: argparse.Namespace, begun: float) -> bool:
    """Runs the cells that the file does not have yet; False if the time was over before all had begun."""
    done = {tuple(line[k] for k in KEY) for line in lines(log)}
    waiting = iter([c for c in cells if c.key not in done])
    log.parent.mkdir(parents=True, exist_ok=True)

    def next_cells(count: int) -> Iterator[Cell]:
        while count and time.perf_counter() - begun < options.stop_after:
            cell = next(waiting, None)
            if cell is None:
                return
            count -= 1
            yield cell

    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, mp_context=context) as pool, log.open("a") as file:
        running: set[Future[dict[str, Any]]] = set()
        while True:
            running |= {
                pool.submit(run, c, options.device, options.data_dir) for c in next_cells(options.jobs - len(running))
            }
            if not running:
                return next(waiting, None) is None
            finished, running = wait(running, return_when=FIRST_COMPLETED)
            for future in finished:
                line = future.result()
                file.write(json.dumps(line) + "\n")
                file.flush()
                shown = {k: line.get(k) for k in ("data", "alpha", "seed", "method", "lr", "accuracy", "wall")}
                print(json.dumps(shown), flush=True)


def best_rates(tuning: list[dict[str, Any]]) -> dict[tuple[str, str], float]:
    """For each data set and method the rate with the best accuracy on the tuning seed; the smaller one of equals."""
    best: dict[tuple[str, str], tuple[float, float]] = {}
    for line in tuning:
        if line["text"] != Cell(line["data"], line["alpha"], line["seed"], line["method"], line["lr"]).text:
            continue  # a trial with other settings
        found = (line["accuracy"] or 0.0, -line["lr"])
        best[line["data"], line["method"]] = max(best.get((line["data"], line["method"]), (-1.0, 0.0)), found)
    return {key: -rate for key, (_, rate) in best.items()}


# The table ------------------------------------------------------------------------------------------------


def table(out: Path, reasons: dict[str, str]) -> str:
    """The Markdown page: a table for each data set and alpha, personalised methods below FedAvg marked."""
    rates, cells = best_rates(lines(out / "tuning.jsonl")), lines(out / "cells.jsonl")
    parts = []
    for data in SETTINGS:
        for alpha in ALPHAS:
            rows = {m: chosen(cells, data, alpha, m, rates) for m in methods()}
            rows = {m: found for m, found in rows.items() if found}
            if rows:
                parts.append(section(data, alpha, rows, rates, reasons))
    return "\n\n".join(parts) + "\n"


def chosen(
    cells: list[dict[str, Any]], data: str, alpha: float, method: str, rates: dict[tuple[str, str], float]
) -> list[dict[str, Any]]:
    """The cells of one row, one per seed."""
    wanted = {Cell(data, alpha, seed, method, rates.get((data, method), 0.0)).key for seed in SEEDS}
    return [c for c in cells if tuple(c[k] for k in KEY) in wanted]


def section(
    data: str,
    alpha: float,
    rows: dict[str, list[dict[str, Any]]],
    rates: dict[tuple[str, str], float],
    reasons: dict[str, str],
) -> str:
    """One table, best first."""

    def mean(method: str, key: str) -> float:
        return statistics.fmean(c.get(key) or 0.0 for c in rows[method])

    base = mean("fedavg", "accuracy") if "fedavg" in rows else 0.0
    head = f"## {data}, Dirichlet {alpha}\n\n| method | model | lr | accuracy | by rows | worst decile | MB up | MB down | CPU s | seeds |"
    text = [head, "|---|---|---|---|---|---|---|---|---|---|"]
    for method in sorted(rows, key=lambda m: -mean(m, "accuracy")):
        values = [c["accuracy"] or 0.0 for c in rows[method]]
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        low = alpha == TUNING_ALPHA and method not in GLOBAL and mean(method, "accuracy") <= base
        cells = (
            method + ("¹" if low else ""),
            "shared" if method in GLOBAL else "own",
            f"{rates[data, method]:g}",
            f"{100 * statistics.fmean(values):.1f} ± {100 * spread:.1f}",
            f"{100 * mean(method, 'accuracy_weighted'):.1f}",
            f"{100 * mean(method, 'accuracy_worst10'):.1f}",
            f"{mean(method, 'bytes_up') / 1e6:.1f}",
            f"{mean(method, 'bytes_down') / 1e6:.1f}",
            f"{mean(method, 'cpu'):.0f}",
            str(len(values)),
        )
        text.append("| " + " | ".join(cells) + " |")
    below = [m for m in rows if m not in GLOBAL and mean(m, "accuracy") <= base] if alpha == TUNING_ALPHA else []
    text += ["", "¹ Not above FedAvg:", ""] if below else []
    text += [f"- *{m}*: {reasons.get(f'{data} {m}', 'the reason has not been found.')}" for m in below]
    return "\n".join(text)


def methods() -> list[str]:
    """Every registered method, FedAvg first, so that interrupted tables have something to compare with."""
    return sorted(fl.list_methods(), key=lambda m: (m != "fedavg", m))


def main() -> None:
    """Tunes, runs what is missing, or writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1, help="processes of one thread each")
    parser.add_argument("--data", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--alpha", type=float, nargs="+", default=list(ALPHAS))
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--methods", nargs="+", default=methods())
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data-dir", help="folder of the data sets; else FEDLOOM_DATA")
    parser.add_argument("--stop-after", type=float, default=float("inf"), help="seconds after which no cell begins")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--table", action="store_true", help="write table.md from what is there, run nothing")
    options = parser.parse_args()
    if options.table:
        reasons = json.loads((HERE / "reasons.json").read_text()) if (HERE / "reasons.json").exists() else {}
        (HERE / "table.md").write_text(table(options.out, reasons), encoding="utf-8")
        return
    begun = time.perf_counter()
    tuning = [Cell(d, TUNING_ALPHA, TUNING_SEED, m, lr) for d in options.data for m in options.methods for lr in RATES]
    if not run_all(tuning, options.out / "tuning.jsonl", options, begun):
        return
    rates = best_rates(lines(options.out / "tuning.jsonl"))
    grid = [(s, d, a, m) for s in options.seeds for d in options.data for a in options.alpha for m in options.methods]
    run_all([Cell(d, a, s, m, rates[d, m]) for s, d, a, m in grid], options.out / "cells.jsonl", options, begun)


if __name__ == "__main__":
    main()
