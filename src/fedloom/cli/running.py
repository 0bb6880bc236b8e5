"""``fedloom run``: one run from a configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fedloom import config
from fedloom.result import Result
from fedloom.simulation import fit
from fedloom.store.folder import finite


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
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no table.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The summary as JSON, no progress.")] = False,
) -> None:
    """Run one configuration; a finished run is only shown again with --resume."""
    table = config.load(configuration, assignments or ())
    folder = out if out is not None else Path("runs") / configuration.stem
    result = fit(**arguments(table), out=folder, resume=resume, progress=not (quiet or as_json))
    show(result, quiet=quiet, as_json=as_json)


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
