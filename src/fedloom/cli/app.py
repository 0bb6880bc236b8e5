"""The commands, put together."""

from __future__ import annotations

from typing import Annotated

import typer

from fedloom.cli import check, cite, compare, demo, deploy, doctor, listing, predict, report, run, theory
from fedloom.version import __version__

HELP = """Personalised federated learning on PyTorch.

Begin with `fedloom demo`, look at `fedloom list methods`, then write a configuration, `fedloom run` it, and `fedloom compare` methods on it.
"""

app = typer.Typer(
    name="fedloom",
    help=HELP,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
)


def _version(shown: bool) -> None:
    if shown:
        typer.echo(f"fedloom {__version__}")
        raise typer.Exit


@app.callback()
def top(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and leave.")
    ] = False,
) -> None:
    """The options before a command."""


app.command("demo")(demo.demo)
app.command("run")(run.run)
app.command("compare")(compare.compare)
app.command("report")(report.report)
app.command("list")(listing.names)
app.command("tune")(run.tune)
app.command("predict")(predict.predict)
app.command("export")(predict.export)
app.command("check")(check.check)
app.command("cite")(cite.cite)
app.command("theory")(theory.theory)
app.command("doctor")(doctor.doctor)
app.add_typer(deploy.app, name="deploy")
