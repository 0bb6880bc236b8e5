"""``fedloom report``: one HTML file from runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fedloom.reports import report as write
from fedloom.reports.make_report import watch as live


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Folders of runs, of a comparison, or folders that hold runs."),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="File to write; report.html in the runs' folder without.", show_default=False),
    ] = None,
    title: Annotated[str, typer.Option(help="Title of the page.", show_default=False)] = "",
    tsne: Annotated[
        bool, typer.Option(help="Draw the clients' rows by t-SNE too, where scikit-learn is there.")
    ] = True,
    watch: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", min=1, help="Write it anew every so many seconds until the runs are finished."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Do not say where it is.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Say where it is as JSON.")] = False,
) -> None:
    """Write one self-contained HTML page about runs: curves, clients, data, costs, how to repeat them."""

    def say(made: Path) -> None:
        if as_json:
            typer.echo(json.dumps({"report": str(made.resolve())}))
        elif not quiet:
            typer.echo(f"report: {made.resolve()}")

    if watch is None:
        say(write(runs, out, title=title, tsne=tsne))
    else:
        live(runs, out, watch, title=title, said=say)
