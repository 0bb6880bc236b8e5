"""The commands, put together."""

from __future__ import annotations

from typing import Annotated

import typer

from fedloom.cli import comparing, computing, deploy, helping, listing, reporting, running, showing, using
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


app.command("demo")(showing.demo)
app.command("run")(running.run)
app.command("compare")(comparing.compare)
app.command("report")(reporting.report)
app.command("list")(listing.names)
app.command("tune")(running.tune)
app.command("predict")(using.predict)
app.command("export")(using.export)
app.command("check")(helping.check)
app.command("cite")(helping.cite)
app.command("theory")(computing.theory)
app.command("doctor")(helping.doctor)
app.add_typer(deploy.app, name="deploy")
