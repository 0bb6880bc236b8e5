"""``fedloom compare``: a grid of runs, and what they say together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedloom.cli.run import arguments
from fedloom.comparison import compare as compared
from fedloom.runs import config_file
from fedloom.runs.run_folder import finite


def compare(
    configuration: Annotated[Path, typer.Argument(metavar="CONFIG.toml", help="The configuration of all runs.")],
    methods: Annotated[
        str | None,
        typer.Option(help="Methods with ; between them; that of the configuration without.", show_default=False),
    ] = None,
    seeds: Annotated[str, typer.Option(help="Seeds, such as 0,1,2 or 0-9.")] = "0,1,2",
    sweep: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=V,V,...", help="Values of an option, such as data.alpha=0.1,0.3; may be repeated."),
    ] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a key for all runs; may be repeated."),
    ] = None,
    baseline: Annotated[
        str | None, typer.Option(help="The method to hold the others against; the first without.", show_default=False)
    ] = None,
    target: Annotated[
        float | None,
        typer.Option(
            help="Value of the metric to count rounds and bytes to; the baseline's mean without.", show_default=False
        ),
    ] = None,
    jobs: Annotated[str, typer.Option(help="Runs at once, or auto: by processors and memory, one on CUDA.")] = "auto",
    out: Annotated[
        Path | None,
        typer.Option(help="Folder; runs/NAME-compare of the configuration without.", show_default=False),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no table.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The tables as JSON, no progress.")] = False,
) -> int:
    """Run methods x seeds x swept options; called again it goes on. Status 1 where a run failed."""
    table = config_file.load(configuration, [*(assignments or ()), *([] if methods is None else ["method=fedavg"])])
    given = arguments(table)
    own, _ = given.pop("method"), given.pop("seed", None)
    try:
        made = compared(
            own if methods is None else methods,
            seeds=seeds,
            sweep=sweep,
            baseline=baseline,
            target=target,
            out=out if out is not None else Path("runs") / f"{configuration.stem}-compare",
            jobs=jobs,
            progress=not (quiet or as_json),
            **given,
        )
    except KeyboardInterrupt:
        typer.echo("fedloom: stopped; the same command goes on where it stopped", err=True)
        raise typer.Exit(130) from None
    found = made.tables
    if as_json:
        rows = {name: found[name].rows for name in found if name != "clients"}
        typer.echo(json.dumps(finite({"out": str(made.path), "metric": made.metric, **rows}), indent=2))
    elif not quiet:
        console = Console()
        if not console.is_terminal:
            console.width = 120
        overall = ["overall"] if made.sweep and len(made.methods) > 1 else []
        for name in ["summary", "costs", *overall, *(["gap"] if "gap" in found else [])]:
            console.print(found[name].rich())
        typer.echo(f"comparison: {made.path}")
    return 1 if made.failed else 0
