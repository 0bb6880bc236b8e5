"""A log of finished runs, and a loop over those that are missing.

A case is a dictionary of plain values that says what is run; a line of the log holds the case and what was found. Runs that are in
the log are not repeated, so a script may be stopped and started again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedloom as fl
from fedloom.engines.vectorised import VectorisedEngine
from fedloom.theory import escape_round

Case = dict[str, Any]
TESTS = 5
"""Tests at the end of a run of which the mean is shown where a single round may drop by ten points."""
WAVE = 20
"""Most clients side by side on a GPU; cohorts of these experiments have 10 or 20."""


def arguments(doc: str | None, out: Path, **defaults: Any) -> argparse.ArgumentParser:
    """The options that every experiment has."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=defaults.get("seeds", [0, 1, 2]))
    parser.add_argument("--rounds", type=int, default=defaults.get("rounds", 100))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default=defaults.get("precision", "fp32"))
    parser.add_argument("--every", type=int, default=defaults.get("every", 10), help="rounds between evaluations")
    parser.add_argument("--data-dir")
    parser.add_argument("--rows", type=int, help="use so many training rows only, to try a script")
    parser.add_argument("--only", help="only these rows of the table, separated by |")
    parser.add_argument("--out", type=Path, default=out, help="folder of the log")
    parser.add_argument(
        "--stop-after", type=float, default=math.inf, help="seconds; no run begins that would end later"
    )
    parser.add_argument(
        "--shard", default="0/1", help="i/n: only every n-th case from the i-th; several processes may share a log"
    )
    parser.add_argument(
        "--queue",
        type=Path,
        help="an empty folder that several processes share: each takes the next case that none has taken",
    )
    parser.add_argument("--table", action="store_true", help="show the table of what is in the log, run nothing")
    return parser


def chosen(names: Iterable[str], only: str | None) -> list[str]:
    """The names that are asked for, or all."""
    wanted = None if only is None else {word.strip() for word in only.split("|")}
    return [n for n in names if wanted is None or n in wanted]


def read(log: Path) -> list[dict[str, Any]]:
    """The lines of a log; none where there is no log."""
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def play(cases: Iterable[Case], run: Callable[[Case], dict[str, Any]], log: Path, options: argparse.Namespace) -> None:
    """Runs the cases that are not in the log, in order, and appends a line for each that is finished."""
    log.parent.mkdir(parents=True, exist_ok=True)
    first, step = (int(v) for v in options.shard.split("/"))
    lines = read(log)
    done = {json.dumps(line["case"], sort_keys=True) for line in lines}
    begun, longest = time.perf_counter(), 0.0
    warnings.simplefilter("ignore", UserWarning)
    for case in list(cases)[first::step]:
        if json.dumps(case, sort_keys=True) in done:
            continue
        started = time.perf_counter()
        if started - begun + max(longest, _lately(lines, case)) > options.stop_after:
            continue  # there may be shorter ones
        if options.queue is not None and not _taken(case, options.queue):
            continue
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        try:
            found = run(case)
        except fl.errors.RunError as error:
            found = {"failed": str(error)}
        wall = time.perf_counter() - started
        longest = max(longest, wall)
        line = {"case": case, "found": found, "wall": round(wall, 2), **machine()}
        if torch.cuda.is_available():
            line["gpu_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        with log.open("a") as file:
            file.write(json.dumps(line) + "\n")
        shown = {k: round(v, 4) for k, v in found.items() if isinstance(v, float)}
        print(json.dumps({**case, **shown, "wall": round(wall, 1)}), flush=True)


def _lately(lines: list[dict[str, Any]], case: Case) -> float:
    """Seconds that the last runs on such a machine and on the same data took, as a median; 0 where there are none."""
    where = machine()["device"]
    walls = [x["wall"] for x in lines if x["device"] == where and x["case"].get("data") == case.get("data")]
    return statistics.median(walls[-TESTS:]) if walls else 0.0


def _taken(case: Case, queue: Path) -> bool:
    """Whether this process is the first to ask for a case."""
    queue.mkdir(parents=True, exist_ok=True)
    name = hashlib.sha256(json.dumps(case, sort_keys=True).encode()).hexdigest()[:24]
    try:
        (queue / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def conduct(
    parser: argparse.ArgumentParser,
    log: str,
    cases: Callable[[argparse.Namespace], Iterable[Case]],
    run: Callable[[Case, fl.data.Dataset, argparse.Namespace], dict[str, Any]],
    report: Callable[[Path], str],
    data: str | None = None,
) -> None:
    """Reads the options, runs the cases that are missing on a data set (``data``, else ``--data``), shows the table of the log."""
    options = parser.parse_args()
    path = options.out / log
    if not options.table:
        rows = shrunk(fl.data.load(data or options.data, data_dir=options.data_dir), options.rows)
        play(cases(options), lambda case: run(case, rows, options), path, options)
    print(report(path))


def engine(options: argparse.Namespace) -> VectorisedEngine | str:
    """The engine of a run: what the rule takes, but on a GPU without its trial of a dozen rows, which takes as long as many rounds.

    Waves are short, so that a test of all clients leaves memory to the other processes that share the GPU.
    """
    return VectorisedEngine(wave=WAVE) if options.device == "cuda" else "auto"


def machine() -> dict[str, str]:
    """Where a run was made."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {"device": device, "torch": torch.__version__, "fedloom": fl.__version__}


def late(found: dict[str, Any], *metrics: str) -> float | None:
    """The mean of the last tests of a run, of the first metric that has a curve; None where there are too few."""
    curve = next((found[f"curve_{m}"] for m in metrics if found.get(f"curve_{m}")), [])[-TESTS:]
    return sum(v for _, v in curve) / TESTS if len(curve) == TESTS else None


def measured(result: fl.Result, primary: str = "accuracy", keep: Iterable[str] = ()) -> dict[str, Any]:
    """The last round's metrics, the curve of the first one, when it leaves its plateau, bytes and seconds."""
    history, last = result.history, result.history[-1]
    names = [k for k, v in last.items() if isinstance(v, float) and not k.startswith("seconds")]
    found = {k: last[k] for k in names}
    for key in (primary, f"global_{primary}"):
        curve = [(r["round"], r[key]) for r in history if r.get(key) is not None]
        if len(curve) > 1:
            found[f"curve_{key}"] = [(r, round(v, 5)) for r, v in curve]
            found[f"best_{key}"] = max(v for _, v in curve)
        if len(curve) == len(history) and len(curve) > 3:
            found[f"escape_{key}"] = escape_round(curve=tuple(v for _, v in curve)).value
    for name in keep:
        found[name] = [r.get(name) for r in history]
    for name in ("bytes_up", "bytes_down", "seconds"):
        found[name] = sum(r.get(name) or 0 for r in history)
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in found.items()}


def shrunk(data: fl.data.Dataset, rows: int | None) -> fl.data.Dataset:
    """A data set with so many of its training rows, and as large a share of its test rows, in their order."""
    if rows is None or rows >= len(data.train):
        return data
    draw = np.random.default_rng(0)
    kept = np.sort(draw.choice(len(data.train), rows, replace=False))
    made = replace(
        data,
        train=data.train.take(torch.from_numpy(kept)),
        train_groups=None if data.train_groups is None else data.train_groups[kept],
        sequences=None if data.sequences is None else data.sequences[kept],
    )
    if data.test is None:
        return made
    size = max(1, round(rows / len(data.train) * len(data.test)))
    tested = np.sort(draw.choice(len(data.test), size, replace=False))
    return replace(
        made,
        test=data.test.take(torch.from_numpy(tested)),
        test_groups=None if data.test_groups is None else data.test_groups[tested],
        test_sequences=None if data.test_sequences is None else data.test_sequences[tested],
    )
