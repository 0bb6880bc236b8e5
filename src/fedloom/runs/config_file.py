"""Configuration files: TOML in, arguments of ``fit`` out, and back."""

from __future__ import annotations

import inspect
import tomllib
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedloom import data as sets
from fedloom import models
from fedloom.data import Federation
from fedloom.data.augment import Augment
from fedloom.errors import UnknownName, UserError
from fedloom.rounds.diagnostics.probe import Diagnostics
from fedloom.rounds.evaluation import Evaluate
from fedloom.rounds.modes import Mixing
from fedloom.rounds.sampling import Participation
from fedloom.runs.options import Data, Settings
from fedloom.spec import optimizer as optim
from fedloom.spec import text_form
from fedloom.spec.optimizer import Optimizer
from fedloom.spec.options import default, option_names, read
from fedloom.spec.type_check import checked
from fedloom.store.format_number import check_format
from fedloom.tasks import Task

Table = dict[str, Any]

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {"sgd": optim.sgd, "adam": optim.adam, "adamw": optim.adamw}

SECTIONS: dict[str, type[Any]] = {
    "data": Data,
    "hybrid": Mixing,
    "participation": Participation,
    "evaluate": Evaluate,
    "augment": Augment,
    "diagnostics": Diagnostics,
}
"""Tables of a configuration whose keys are fixed."""

KEYS = (
    "method",
    "data",
    "model",
    "optimizer",
    *option_names(Settings),
    "hybrid",
    "participation",
    "evaluate",
    "augment",
    "diagnostics",
)
"""Every key of a configuration; each is an argument of ``fit``."""

WRITTEN = ("format", "resolved", "repeatable")
"""Keys that only ``fit`` writes, into ``run.toml``; a configuration may carry them."""


# Files ------------------------------------------------------------------------------------------------------


def load(path: str | Path, assignments: Sequence[str] = ()) -> Table:
    """Arguments of ``fit`` from a TOML file and from assignments such as ``optimizer.lr=0.1``.

    Args:
        path: the file.
        assignments: ``a.b=c`` each; the value is read as TOML, or as text where that fails.
    """
    place = Path(path)
    try:
        table = tomllib.loads(place.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise UserError(f"cannot read the configuration {place}: {reason}") from None
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        raise UserError(f"{place} is not valid TOML: {error}") from None
    for text in assignments:
        assign(table, text)
    return check(table)


def assign(table: Table, text: str) -> None:
    """Sets one key of a nested table, in place.

    Example:
        >>> table = {"rounds": 5}
        >>> assign(table, "optimizer.lr=0.1")
        >>> table
        {'rounds': 5, 'optimizer': {'lr': 0.1}}
    """
    name, found, value = text.partition("=")
    keys = [k.strip() for k in name.split(".")]
    if not found or not all(keys):
        raise UserError(f"--set {text!r}: expected key=value or table.key=value")
    try:
        parsed: Any = tomllib.loads(f"value = {value}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError, ValueError, KeyError):
        parsed = value.strip()
    place = table
    for key in keys[:-1]:
        inner = place.get(key, {})
        if isinstance(inner, str):
            inner = {"name": inner}
        if not isinstance(inner, dict):
            raise UserError(f"--set {text!r}: {key!r} is not a table")
        place[key] = inner
        place = inner
    place[keys[-1]] = parsed


def check(table: Mapping[str, Any]) -> Table:
    """Keys, types and ranges of a configuration; what else can be wrong is found where it is used."""
    made = {k: v for k, v in table.items() if k not in WRITTEN}
    for key in made:
        if key not in KEYS:
            raise UnknownName("key", str(key), KEYS)
    if "format" in table:  # the configuration is a run.toml
        check_format("the configuration", table["format"], "Write another one for this version.")
    if table.get("repeatable") is False:
        raise UserError("this configuration is of a run whose data or model were given in Python; repeat it there")
    for key in ("method", "data"):
        if key not in made:
            raise UserError(
                f"the configuration has no {key!r}; expected at least method = '...' and [data] name = '...'"
            )
    checked("method", made["method"], str)
    read(Settings, {k: v for k, v in made.items() if k in option_names(Settings)}, "")
    for key, cls in SECTIONS.items():
        if key in made and not (key == "data" and isinstance(made[key], str)):
            read(cls, made[key], key)
    if "optimizer" in made:
        optimizer_of(made["optimizer"])
    named("model", made.get("model", "mlp"))
    return made


def plain(value: Any) -> Any:
    """A value as TOML and JSON can hold it: no tuples, no None, no objects."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items() if v is not None}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return value if isinstance(value, (bool, int, float, str)) else str(value)


def table_of(options: Any) -> Table:
    """The options of an object that differ from None, as plain values."""
    return {k: plain(v) for k in option_names(type(options)) if (v := getattr(options, k)) not in (None, (), {})}


# Things by name ---------------------------------------------------------------------------------------------


def named(what: str, value: Any) -> tuple[str, Table]:
    """Name and options of ``"name(key=value)"`` or of a table with ``name``."""
    if isinstance(value, str):
        parts = text_form.parse_call(value, what=what)
        if len(parts) != 1 or parts[0][1]:
            raise UserError(f"{what} {value!r}: expected one name, with options by name such as name(key=value)")
        return parts[0][0], parts[0][2]
    if isinstance(value, Mapping):
        options = dict(value)
        name = options.pop("name", None)
        if not isinstance(name, str):
            raise UserError(
                f"[{what}]: expected name = '...' and options, got {', '.join(map(str, value)) or 'nothing'}"
            )
        return name, options
    raise UserError(f"{what}={value!r}: expected a name such as 'name(key=value)' or a table with name and options")


def optimizer_of(value: Optimizer | str | Mapping[str, Any] | None) -> Optimizer:
    """An optimiser from itself, its text form, its table, or None for the default.

    Example:
        >>> optimizer_of("adam(lr=0.01)").lr
        0.01
    """
    if isinstance(value, Optimizer):
        return value
    if value is None:
        return optim.sgd()
    name, options = named("optimizer", {"name": "sgd", **value} if isinstance(value, Mapping) else value)
    if name not in OPTIMIZERS:
        raise UnknownName("optimizer", name, OPTIMIZERS)
    make = OPTIMIZERS[name]
    hints = typing.get_type_hints(make)
    known = inspect.signature(make).parameters
    for key in options:
        if key not in known:
            raise UnknownName(f"option of optimizer {name}", key, known)
    return make(**{k: checked(f"optimizer.{k}", v, hints[k]) for k, v in options.items()})


def optimizer_table(optimizer: Optimizer) -> Table:
    """An optimiser as its table."""
    keys = inspect.signature(OPTIMIZERS[optimizer.name]).parameters
    return {"name": optimizer.name} | {k: plain(v) for k in keys if (v := getattr(optimizer, k)) is not None}


def partitioner_of(text: str) -> sets.Partitioner:
    """A partitioner from its text form, such as ``dirichlet(0.3) + affine(scale=0.2)``."""
    made: sets.Partitioner | None = None
    for name, args, options in text_form.parse_call(text, what="data.partition"):
        if name not in sets.PARTITIONS:
            raise UnknownName("partition", name, sets.PARTITIONS)
        if made is not None and name != "affine":
            raise UserError(f"data.partition {text!r}: only affine(...) can stand behind another partition")
        extra = {} if made is None else {"base": made}
        try:
            made = sets.PARTITIONS[name](*args, **options, **extra)
        except TypeError as error:
            takes = ", ".join(inspect.signature(sets.PARTITIONS[name]).parameters)
            raise UserError(f"data.partition {text!r}: {error}; {name} takes {takes or 'nothing'}") from None
    assert made is not None
    return made


def federation_of(value: object, seed: int) -> tuple[Federation, Table]:
    """A federation from itself or from its table, and the table that makes it again (empty where none does)."""
    if isinstance(value, Federation):
        return value, {k: v for k, v in value.origin.items() if v not in (None, {})}
    options = read(Data, {"name": value} if isinstance(value, str) else value, "data")
    if (options.name is None) == (options.path is None):
        raise UserError("data: expected a name (a data set) or a path (files of your own), one of the two")
    chosen = seed if options.seed is None else options.seed
    common: Table = {"test": options.test, "val": options.val, "seed": chosen}
    if options.preprocess:
        common["preprocess"] = options.preprocess
    if options.name is not None:
        made = sets.load(options.name, data_dir=options.data_dir, **options.options).partition(
            None if options.partition is None else partitioner_of(options.partition),
            options.clients,
            split=options.split,
            **common,
        )
    else:
        assert options.path is not None
        for key in ("clients", "partition", "data_dir"):
            if getattr(options, key) is not None:
                raise UserError(f"data.{key}: the clients of files are those of the files; leave it out")
        more = {k: v for k in ("client", "label", "split") if (v := getattr(options, k)) is not None}
        if options.numeric_label:
            more["numeric_label"] = True
        made = sets.read(options.path, **common, **more, **options.options)
    if options.subset:
        made = made.subset(options.subset)
    table = {k: v for k in option_names(Data) if (v := getattr(options, k)) != default(Data, k)} | {"seed": chosen}
    return made, plain(table)


def model_of(value: Mapping[str, Any] | str, data: Federation, task: Task) -> tuple[Callable[[], nn.Module], Table]:
    """A network by name, with its sizes filled in from the data, and its table."""
    name, options = named("model", value)
    checked("model.head", options.get("head", ""), str)
    x = data.clients[0].train.x
    if not isinstance(x, Tensor):
        raise UserError(
            f"model {name!r} takes one input, but the data have several; give a module of your own in Python"
        )
    return model_by_name(value, outputs_of(data, task), tuple(x.shape[1:])), {"name": name, **plain(options)}


def model_by_name(value: Mapping[str, Any] | str, outputs: int, shape: Sequence[int]) -> Callable[[], nn.Module]:
    """What makes a network by name, for rows of a shape."""
    name, options = named("model", value)
    options = {k: v for k, v in options.items() if k != "head"}
    models.find(name)

    def make() -> nn.Module:
        try:
            return models.build(name, num_classes=outputs, sample_shape=shape, **options)
        except (TypeError, RuntimeError) as error:
            raise UserError(f"model {name!r}: {error}") from None

    return make


def outputs_of(data: Federation, task: Task) -> int:
    """Width of the output that a network by name is given."""
    parts = [rows for client in data for rows in client.parts().values()]
    if task.name == "binary":
        return 1
    if not task.classes:
        return 1 if parts[0].y.dim() == 1 else int(parts[0].y.shape[1])
    if data.classes is not None:
        return len(data.classes)
    tops = [
        int(torch.where(p.y == 255, 0, p.y).max()) if task.name == "segmentation" else int(p.y.max()) for p in parts
    ]
    return max(2, max(tops) + 1)
