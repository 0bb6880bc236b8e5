"""``fedloom cite``: list the papers to cite for a method."""

from __future__ import annotations

from typing import Annotated

import typer

from fedloom.spec import registry, text_form
from fedloom.version import __version__


def cite(method: Annotated[str, typer.Argument(help="A method or plug-in, or a composition of them.")]) -> None:
    """Say which papers to cite for a method."""
    for name, _, _ in text_form.parse_call(method):
        entry = registry.describe(name)
        typer.echo(f"{name}: {entry.paper or 'no paper; it is a part of fedloom itself'}")
    typer.echo(f"fedloom: The fedloom contributors. fedloom {__version__}: personalised federated learning on PyTorch.")
