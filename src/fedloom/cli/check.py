"""``fedloom check``: test the contract of a method."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from fedloom.contract.check_method import check_method
from fedloom.spec import text_form

AsJson = Annotated[bool, typer.Option("--json", help="As JSON.")]


def check(
    method: Annotated[str, typer.Argument(help="A method, such as 'fedprox(mu=0.1) + clip(1.0)'.")],
    as_json: AsJson = False,
) -> int:
    """Run the method contract on a tiny federation; exit status 1 where a line of it does not hold."""
    report = check_method(text_form.method(method))
    if as_json:
        lines = [{"name": c.name, "problem": c.problem} for c in report.checks]
        typer.echo(json.dumps({"method": report.method, "ok": bool(report), "checks": lines}, indent=2))
    else:
        typer.echo(str(report))
    return 0 if report else 1
