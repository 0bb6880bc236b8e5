"""``fedloom theory``: the papers' bounds as calculators."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from fedloom import theory as bounds
from fedloom.errors import UnknownName, UserError
from fedloom.theory import Answer, ModeRow, Parameter


def theory(
    name: Annotated[str | None, typer.Argument(help="A calculator; without, all are listed.")] = None,
    values: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Its arguments.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the paper's figure into this file (escape only).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Compute a bound, as printed (mode=paper) and corrected (mode=sound); a list of numbers is 1,2,3."""
    known: dict[str, Callable[..., Any]] = {**bounds.CALCULATORS, **bounds.TABLES}
    if name is None:
        for each in known:
            typer.echo(f"{each:<24} {bounds.one_line(each)}")
        return
    parameters = {p.name: p for p in bounds.parameters(name)}
    given = _given(name, values or [], parameters)
    missing = [p.name for p in parameters.values() if p.required and p.name not in given]
    if missing:
        lines = "; ".join(f"{p.name} ({p.help.rstrip('.')})" for p in parameters.values() if p.name in missing)
        raise UserError(f"theory {name}: missing {lines}; write key=value")
    if plot is not None:
        _draw(name, plot, given)
    answer = known[name](**given)
    if as_json:
        typer.echo(json.dumps(_plain(answer), indent=2))
    elif isinstance(answer, Answer):
        typer.echo(answer.summary())
    else:
        for row in answer:
            typer.echo(_row(row))


def _given(name: str, values: list[str], parameters: dict[str, Parameter]) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for text in values:
        key, found, value = text.partition("=")
        if not found:
            raise UserError(f"theory {name}: {text!r}; expected key=value")
        if key not in parameters:
            raise UnknownName(f"argument of {name}", key, parameters)
        given[key] = _value(name, key, value, parameters[key].kind)
    return given


def _value(name: str, key: str, text: str, kind: str) -> Any:
    try:
        if kind == "numbers":
            return [float(part) for part in text.split(",")]
        if kind == "number":
            return float(text)
        if kind == "whole":
            return int(text)
    except ValueError:
        raise UserError(f"theory {name}: {key}={text!r}; expected {_WORDS[kind]}") from None
    if kind == "mode":
        if text not in ("paper", "sound"):
            raise UserError(f"theory {name}: {key}={text!r}; expected paper or sound")
        return text
    if text.lower() not in ("true", "false"):
        raise UserError(f"theory {name}: {key}={text!r}; expected true or false")
    return text.lower() == "true"


_WORDS = {"numbers": "numbers such as 1,2,3", "number": "a number", "whole": "a whole number"}


def _draw(name: str, plot: Path, given: dict[str, Any]) -> None:
    if name not in bounds.FIGURES:
        raise UserError(f"theory {name} has no figure; {', '.join(bounds.FIGURES)} has")
    drawn = bounds.FIGURES[name](plot, **given)
    typer.echo(f"figure: {drawn}", err=True)


def _row(row: ModeRow) -> str:
    holds = "holds" if row.holds else "does not hold"
    return (
        f"{row.mode}: {row.update}\n  bound {row.formula} = {row.bound.value:.6g}\n  rate {row.rate}\n"
        f"  condition {row.condition}: {holds}\n  rounds = {row.rounds.value:.6g}"
    )


def _plain(value: Any) -> Any:
    """An answer as JSON can hold it; numbers that are not finite are texts."""
    if isinstance(value, Answer):
        parts = ("name", "value", "mode", "conditions", "claims", "terms", "reason")
        return {k: _plain(getattr(value, k)) for k in parts}
    if hasattr(value, "__dataclass_fields__"):
        return {k: _plain(getattr(value, k)) for k in value.__dataclass_fields__}
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, np.generic):
        return _plain(value.item())
    return str(value) if isinstance(value, float) and not np.isfinite(value) else value
