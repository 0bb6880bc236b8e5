"""``fedloom list``: what there is, one line each."""

from __future__ import annotations

import inspect
import json
import typing
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any

import typer

from fedloom import data, models
from fedloom.errors import UserError
from fedloom.runs import config_file
from fedloom.runs.options import Settings
from fedloom.runs.tap_report import model_costs
from fedloom.spec import registry
from fedloom.spec.options import default, meanings, option_names
from fedloom.spec.registry import Entry
from fedloom.spec.type_check import words

Row = dict[str, Any]


class What(StrEnum):
    """What can be listed."""

    methods = "methods"
    plugins = "plugins"
    models = "models"
    datasets = "datasets"
    partitions = "partitions"
    options = "options"
    taps = "taps"


def names(
    what: Annotated[What, typer.Argument(help="What to list.")],
    model: Annotated[str | None, typer.Argument(help="For taps: the network.", show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """List what there is: name, hyper-parameters, summary and paper, one line each."""
    if (what == What.taps) != (model is not None):
        raise UserError(
            "list: a network belongs to taps and to nothing else; write for example: fedloom list taps convnet4"
        )
    rows = _taps(model) if model is not None else _ROWS[what]()
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    for row in rows:
        more = "".join(f"  [{row[key]}]" for key in ("uploads", "paper") if row.get(key))
        typer.echo(f"{row['form']}  {row['summary']}{more}")


def form(fn: Callable[..., Any], name: str) -> str:
    """A function as it is written in a configuration: ``name(key=default, ...)``."""
    parts = []
    for key, parameter in inspect.signature(fn).parameters.items():
        parts.append(key if parameter.default is parameter.empty else f"{key}={parameter.default!r}")
    return f"{name}({', '.join(parts)})"


def summary(fn: Callable[..., Any]) -> str:
    """First line of a docstring."""
    return (inspect.getdoc(fn) or "").split("\n", 1)[0]


def _entry(entry: Entry) -> Row:
    row: Row = {"name": entry.name, "form": form(entry.fn, entry.name), "summary": entry.summary, "paper": entry.paper}
    row["hyperparameters"] = {
        k: None if v is inspect.Parameter.empty else _plain(v) for k, v in entry.parameters.items()
    }
    if entry.presets:
        row["presets"] = {k: {a: _plain(b) for a, b in v.items()} for k, v in entry.presets.items()}
    if entry.kind == "method":
        row["uploads"] = _uploads(entry)
    return row


def _uploads(entry: Entry) -> str:
    """What a method sends, from its record; empty where it cannot be made without hyper-parameters."""
    try:
        entries = entry.fn().reducers()
    except ValueError:
        return ""
    return "sends " + (", ".join(f"{k}: {v}" for k, v in entries.items()) or "nothing")


def _plain(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float, str, type(None), list, tuple)) else str(value)


def _functions(table: dict[str, Callable[..., Any]]) -> list[Row]:
    return [
        {"name": name, "form": form(fn, name), "summary": summary(fn), "paper": ""}
        for name, fn in sorted(table.items())
    ]


def _taps(model: str) -> list[Row]:
    """What each place to tap a network adds to a step on a batch of eight rows."""
    return [
        {
            "name": tap.name,
            "form": f"{'*' if tap.chosen else ' '} {tap.name}",
            "summary": f"{tap.kind}; {tap.channels} channels x {tap.positions}; {tap.parameters:,} parameters, "
            f"{tap.seconds * 1e3:.2f} ms and {tap.memory / 1e6:.2f} MB a step",
            "paper": "",
            "chosen": tap.chosen,
            "parameters": tap.parameters,
            "seconds": tap.seconds,
            "memory": tap.memory,
        }
        for tap in model_costs(model)
    ]


_PARTS: dict[str, tuple[str, str | None, str]] = {
    "method": (
        "text",
        None,
        "the method: a recipe, then plug-ins, such as `fedprox(mu=0.01) + clip(1.0)` "
        "(`fedloom list methods`, `list plugins`)",
    ),
    "model": (
        "text or a table",
        "mlp",
        'a network by name, `model = "convnet4(width=64)"` or a table `[model]` with `name` and the network\'s options '
        "(`fedloom list models`); `head` names the head's leaves where it is not found. In Python also any module",
    ),
    "optimizer": (
        "text or a table",
        "sgd(lr=0.05)",
        '`optimizer = "adam(lr=1e-3)"` or a table `[optimizer]` with `name` (sgd, adam, adamw) and its options',
    ),
}
"""Type, default and meaning of the options that no class of options holds."""


def option_rows() -> list[Row]:
    """List every option: table, key, type in words, default, meaning."""
    rows: list[Row] = [
        {"table": "", "key": key, "type": kind, "default": value, "meaning": meaning}
        for key, (kind, value, meaning) in _PARTS.items()
    ]
    tables: dict[str, type[Any]] = {"": Settings, **config_file.SECTIONS}
    for table, cls in tables.items():
        hints, texts = typing.get_type_hints(cls), meanings(cls)
        for key in option_names(cls):
            value = default(cls, key)
            shown = None if value is None else config_file.plain(value)
            rows.append(
                {"table": table, "key": key, "type": words(hints[key]), "default": shown, "meaning": texts[key]}
            )
    return rows


def _options() -> list[Row]:
    rows = []
    for row in option_rows():
        key = f"{row['table']}.{row['key']}" if row["table"] else row["key"]
        shown = f" = {row['default']!r}" if row["default"] is not None else ""
        rows.append({"name": key, "form": f"{key}{shown}", "summary": f"({row['type']}) {row['meaning']}", "paper": ""})
    return rows


_ROWS: dict[What, Callable[[], list[Row]]] = {
    What.methods: lambda: [_entry(registry.METHODS[n]) for n in registry.list_methods()],
    What.plugins: lambda: [_entry(registry.PLUGINS[n]) for n in registry.list_plugins()],
    What.models: lambda: _functions(dict(models.MODELS)),
    What.datasets: lambda: _functions(dict(data.DATASETS)),
    What.options: _options,
    What.partitions: lambda: _functions(dict(data.PARTITIONS)),
}
