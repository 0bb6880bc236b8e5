"""``fedloom report``: one HTML file from runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fedloom.reports import report as write


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
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Do not say where it is.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Say where it is as JSON.")] = False,
) -> None:
    """Write one self-contained HTML page about runs: curves, clients, data, costs, how to repeat them."""
    made = write(runs, out, title=title, tsne=tsne).resolve()
    if as_json:
        typer.echo(json.dumps({"report": str(made)}))
    elif not quiet:
        typer.echo(f"report: {made}")
