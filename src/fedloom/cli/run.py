"""``fedloom run``: one run from a configuration."""

from __future__ import annotations

import json
import statistics
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fedloom.api import fit
from fedloom.comparison.cross_validation import cross_validate
from fedloom.engines import distributed
from fedloom.errors import NotVectorisable, UserError
from fedloom.runs import config_file
from fedloom.runs.result import Result
from fedloom.runs.run_folder import finite
from fedloom.store import atomic


def run(
    configuration: Annotated[Path, typer.Argument(metavar="CONFIG.toml", help="The configuration.")],
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a key, such as optimizer.lr=0.1; may be repeated."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the run; runs/NAME of the configuration without.", show_default=False)
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what is in the folder.")] = False,
    folds: Annotated[
        int | None,
        typer.Option(min=2, help="Cross-validate: test every part of each client's rows once.", show_default=False),
    ] = None,
    repeats: Annotated[
        int | None, typer.Option(min=1, help="Cut the rows anew so often, with --folds.", show_default=False)
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no table.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The summary as JSON, no progress.")] = False,
) -> None:
    """Run one configuration; a finished run is only shown again with --resume."""
    table = config_file.load(configuration, assignments or ())
    folder = out if out is not None else Path("runs") / configuration.stem
    judging = dict(table.get("evaluate", {}))
    cuts, times = (
        judging.get("folds", 0) if folds is None else folds,
        judging.get("repeats", 1) if repeats is None else repeats,
    )
    if cuts:
        _folded(table, folder, cuts, times, resume=resume, quiet=quiet, as_json=as_json)
        return
    result = fit(**arguments(table), out=folder, resume=resume, progress=not (quiet or as_json))
    ranks = distributed.joined()
    if ranks is None or ranks.first:
        show(result, quiet=quiet, as_json=as_json)


def _folded(
    table: dict[str, Any], out: Path, folds: int, repeats: int, *, resume: bool, quiet: bool, as_json: bool
) -> None:
    """Cross-validation: a run for each part, then the numbers with their intervals."""
    if out.is_dir() and any(out.iterdir()) and not resume:
        raise UserError(f"{out} is not empty; choose another folder, or go on with --resume")
    shown = not (quiet or as_json)
    found = cross_validate(**arguments(table), folds=folds, repeats=repeats, out=out, resume=resume, progress=shown)
    ranks = distributed.joined()
    if ranks is not None and not ranks.first:
        return
    if as_json:
        typer.echo(json.dumps(finite(found.record() | {"out": str(out)}), indent=2))
    elif not quiet:
        typer.echo(f"{folds} folds, {repeats} times: mean over runs and 95 % interval\n{found}\nruns: {out}")


def arguments(table: dict[str, Any]) -> dict[str, Any]:
    """The arguments of ``fit`` in a configuration; the network is ``mlp`` where it names none."""
    return {"model": "mlp", **table}


def show(result: Result, *, quiet: bool, as_json: bool) -> None:
    """Prints a result as a table, as JSON, or not at all."""
    summary = result.summary()
    if as_json:
        numbers = {name: getattr(summary, name) for name in type(summary).__dataclass_fields__}
        typer.echo(json.dumps(finite(numbers | {"out": str(result.path)}), indent=2))
    elif not quiet:
        Console().print(summary.table())
        typer.echo(f"run: {result.path}")


def tune(
    configuration: Annotated[Path, typer.Argument(metavar="CONFIG.toml", help="The configuration.")],
    assignments: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a key; may be repeated.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds of each way.")] = 3,
    write: Annotated[bool, typer.Option("--write", help="Write the fastest way into the configuration.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Measure which engine runs a configuration fastest here; engine = "auto" goes by a rule instead."""
    table = config_file.load(configuration, assignments or ())
    seconds = measure_engines(table, rounds)
    best = {"engine": min(seconds, key=lambda engine: seconds[engine]), "workers": 0}
    if write:
        text = configuration.read_text(encoding="utf-8")
        atomic.write(configuration, with_keys(text, best).encode())
    if as_json:
        typer.echo(json.dumps({**best, "seconds": seconds}, indent=2))
        return
    for engine, median in sorted(seconds.items(), key=lambda item: item[1]):
        typer.echo(f"{engine:<14} {median:.4f} s a round")
    typer.echo(f'engine = "{best["engine"]}"\nworkers = 0')


def measure_engines(table: dict[str, Any], rounds: int) -> dict[str, float]:
    """Measure the seconds of a median round of each engine that can run a configuration.

    Args:
        table: the configuration.
        rounds: timed rounds; the first round of each engine comes on top and is left out.
    """
    seconds: dict[str, float] = {}
    fixed = {"workers": 0, "rounds": rounds + 1, "evaluate": {"every": 0}, "progress": False}
    for engine in ("loop", "vectorised"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                result = fit(**{**arguments(table), **fixed, "engine": engine})
            except NotVectorisable:
                continue
        seconds[engine] = statistics.median(r["seconds"] for r in result.history[1:])
    return seconds


def with_keys(text: str, keys: dict[str, Any]) -> str:
    r"""A configuration with some keys of its top level set; everything else stays as it was written.

    Example:
        >>> with_keys('rounds = 5\nengine = "auto"\n[data]\nname = "digits"', {"engine": "loop"})
        'engine = "loop"\nrounds = 5\n[data]\nname = "digits"'
    """
    lines = text.split("\n")
    top = next((i for i, line in enumerate(lines) if line.lstrip().startswith("[")), len(lines))
    kept = [x for i, x in enumerate(lines) if i >= top or x.partition("=")[0].strip() not in keys]
    return "\n".join([*(f"{k} = {json.dumps(v)}" for k, v in keys.items()), *kept])
