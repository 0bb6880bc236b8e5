"""``fedloom demo``: the main job on embedded real data."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from fedloom import data
from fedloom.api import fit
from fedloom.comparison.gain import Gain, gain
from fedloom.errors import UserError
from fedloom.reports import report
from fedloom.runs.result import Result
from fedloom.spec import optimizer, registry

DEMO = (
    "local",
    "fedavg",
    "scaffold",
    "fedper",
    "fedrep",
    "ditto",
    "fedaims",
    "omniisr",
    "fedlag",
    "fedmap",
)
"""The methods shown, in this order: training alone, one shared model, parts or copies of one's own, the four papers."""

CLIENTS, ROUNDS, EPOCHS, BATCH, LR = 20, 20, 5, 16, 0.1


def demo(
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the runs, one per method below it; runs/demo, or the next that is free.",
            show_default=False,
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress, only the table.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The table as JSON, no progress.")] = False,
) -> None:
    """Train local models, FedAvg and personalised methods on handwritten digits, side by side (about a minute)."""
    torch.set_num_threads(1)  # the network is so small that a second thread only waits
    console = Console(stderr=True, quiet=quiet or as_json)
    out = _free() if out is None else out
    if out.is_dir() and any(out.iterdir()):
        raise UserError(f"{out} is not empty; choose another folder with --out, or remove it")
    federation = data.load("digits").partition(data.dirichlet(0.3), clients=CLIENTS, seed=0)
    console.print(
        f"digits, {CLIENTS} clients with skewed classes (Dirichlet 0.3), {ROUNDS} rounds, half of the clients in each, "
        f"{EPOCHS} local epochs, the same for every method"
    )
    results: dict[str, tuple[Result, float]] = {}
    for name in DEMO:
        if name not in registry.METHODS:
            continue
        begun = time.perf_counter()
        made = fit(
            name,
            {"name": "mlp", "hidden": [64, 64]},
            federation,
            rounds=ROUNDS,
            cohort=0.5,
            epochs=EPOCHS,
            batch_size=BATCH,
            optimizer=optimizer.sgd(lr=LR),
            evaluate={"every": 5},
            out=out / name,
            progress=not (quiet or as_json),
        )
        results[name] = (made, time.perf_counter() - begun)
        console.print(f"  {name}: done in {results[name][1]:.1f} s")
    rows = [_row(name, made, spent, gain(made, results["local"][0])) for name, (made, spent) in results.items()]
    title = f"fedloom demo: {len(results)} methods, {CLIENTS} clients, handwritten digits"
    page = report([out / name for name in results], out, title=title, tsne=False)
    if as_json:
        typer.echo(json.dumps({"out": str(out), "report": str(page), "methods": rows}, indent=2))
        return
    Console().print(_table(rows))
    typer.echo(f"runs: {out.resolve()}\nreport: {page.resolve()} (open it in a browser)")


def _free() -> Path:
    """``runs/demo``, ``runs/demo-2``, ...: the first that is not there."""
    names = itertools.chain(["demo"], (f"demo-{i}" for i in itertools.count(2)))
    return next(place for name in names if not (place := Path("runs") / name).exists())


def _row(name: str, result: Result, spent: float, over: Gain) -> dict[str, Any]:
    last, summary = result.history[-1], result.summary()
    return {
        "method": name,
        "mean": summary.mean,
        "std": summary.std,
        "worst_decile": last["accuracy_worst10"],
        "gain_over_local": over.mean,
        "helped": over.helped,
        "shared_model": summary.shared,
        "bytes": summary.bytes_up + summary.bytes_down,
        "seconds": round(spent, 2),
    }


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="Accuracy of the clients' own models on their own test rows", title_justify="left")
    heads = (
        "method",
        "mean",
        "std",
        "worst\n10 %",
        "over\nlocal",
        "clients\nhelped",
        "shared\nmodel",
        "MB\nsent",
        "time",
    )
    for i, head in enumerate(heads):
        table.add_column(head, justify="right" if i else "left", no_wrap=True)
    for row in rows:
        shared, alone = row["shared_model"], row["method"] == "local"
        table.add_row(
            row["method"],
            f"{row['mean']:.3f}",
            f"{row['std']:.3f}",
            f"{row['worst_decile']:.3f}",
            "-" if alone else f"{row['gain_over_local']:+.3f}",
            "-" if alone else f"{row['helped']:.0%}",
            "-" if shared is None else f"{shared:.3f}",
            f"{row['bytes'] / 1e6:.1f}",
            f"{row['seconds']:.1f} s",
        )
    return table
