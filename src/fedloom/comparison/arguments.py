"""The arguments of ``fit`` for a cell: the options of the comparison with the cell's values put in their places."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn

from fedloom import data as sets
from fedloom.comparison.grid import described
from fedloom.data import Federation
from fedloom.errors import UnknownName, UserError
from fedloom.runs import config_file
from fedloom.runs.model_files import rows_fingerprint
from fedloom.runs.options import Data
from fedloom.spec import text_form
from fedloom.spec.method import Method
from fedloom.spec.optimizer import Optimizer
from fedloom.spec.options import option_names
from fedloom.tasks import Task

Values = dict[str, Any]


def arguments(base: Mapping[str, Any], method: Method | str, seed: int, options: Mapping[str, Any]) -> Values:
    """Arguments of ``fit`` for one cell; data that a function makes are not made yet, see :func:`federation`.

    Args:
        base: arguments that all cells share.
        method: the cell's method.
        seed: the cell's seed.
        options: the cell's swept values by dotted key.

    Example:
        >>> made = arguments({"data": "digits"}, "fedavg", 1, {"data.alpha": 0.3, "optimizer.lr": 0.1})
        >>> made["data"], made["optimizer"]
        ({'name': 'digits', 'partition': 'dirichlet(0.3)'}, {'lr': 0.1})
    """
    made = {**base, "method": method, "seed": seed}
    for key, value in options.items():
        head, _, rest = key.partition(".")
        if not rest:
            made[head] = value
        elif head == "data":
            made["data"] = _data(made["data"], rest, value)
        elif head == "model" and _makes(made["model"]):
            made["model"] = _with(made["model"], "model", rest, value)
        else:
            made[head] = _nested(_table(head, made.get(head), key), rest.split("."), value, key)
    return made


def model_for(model: Any, options: Mapping[str, Any]) -> Any:
    """A model given in Python, with a cell's swept values; None where there is none or it is known by name."""
    mine = {k: v for k, v in options.items() if k.partition(".")[0] == "model"}
    if model is None and "model" not in mine:
        return None
    made = arguments({"model": model}, "", 0, mine)["model"]
    return None if isinstance(made, (str, Mapping)) else made


def check(made: Mapping[str, Any]) -> None:
    """Refuses wrong arguments before anything runs; what only the data can tell is found by ``fit``."""
    plain = {k: v for k, v in made.items() if k in config_file.KEYS and v is not None}
    plain["method"] = str(text_form.method(made["method"]).text)
    for key in ("data", "model", "optimizer", "task", "engine", "augment"):
        if key in plain and not isinstance(plain[key], (str, Mapping)):
            del plain[key]
    config_file.check({"data": {}, **plain})
    if isinstance(plain.get("evaluate"), Mapping) and plain["evaluate"].get("folds"):
        raise UserError(
            "evaluate.folds is an option of fedloom run and fl.cross_validate; a comparison repeats runs by seeds: leave it out"
        )
    if isinstance(plain.get("data"), Mapping) and isinstance(text := plain["data"].get("partition"), str):
        config_file.partitioner_of(text)


def federation(made: Mapping[str, Any]) -> Any:
    """What ``fit`` takes as data: a federation or a table as given, or what the function makes for the cell's seed."""
    given = made["data"]
    if isinstance(given, (Federation, str, Mapping)):
        return given
    if not callable(given):
        raise UserError(
            f"data: expected a federation, a function that makes one, or a table such as {{'name': 'digits'}}; "
            f"got {type(given).__name__}"
        )
    takes = inspect.signature(given).parameters
    made_by = given(seed=made["seed"]) if "seed" in takes or _open(takes) else given()
    if not isinstance(made_by, Federation):
        raise UserError(f"data: the function made a {type(made_by).__name__}; expected a Federation")
    return made_by


# Places -----------------------------------------------------------------------------------------------------


def _data(given: Any, rest: str, value: Any) -> Any:
    """Data with one option changed; arguments of the partition are options too."""
    if isinstance(given, Federation):
        raise UserError(f"sweep data.{rest}: the data are a federation; give a function of {rest} that makes one")
    if not isinstance(given, (str, Mapping)):
        return _with(given, "data", rest, value)
    table = {"name": given} if isinstance(given, str) else dict(given)
    keys = rest.split(".")
    if keys[0] in option_names(Data):
        return _nested(table, keys, value, f"data.{rest}")
    table["partition"] = _partition(table.get("partition", "dirichlet"), keys[-1], value)
    return table


def _partition(text: str, key: str, value: Any) -> str:
    """The text of a partition with one argument changed."""
    parts, done = [], False
    for name, args, options in text_form.parse_call(text, what="data.partition"):
        if name not in sets.PARTITIONS:
            raise UnknownName("partition", name, sets.PARTITIONS)
        takes = list(inspect.signature(sets.PARTITIONS[name]).parameters)
        values = dict(zip(takes, args, strict=False)) | options
        if key in takes and not done:
            values[key], done = value, True
        given = [repr(v) if k == takes[0] else f"{k}={v!r}" for k, v in values.items()]
        parts.append(f"{name}({', '.join(given)})" if given else name)
    if not done:
        raise UnknownName(f"option of data or argument of its partition {text!r}", key, option_names(Data))
    return " + ".join(parts)


def _makes(given: Any) -> bool:
    return callable(given) and not isinstance(given, nn.Module)


def _with(given: Callable[..., Any], what: str, key: str, value: Any) -> Callable[..., Any]:
    """A function with one argument set."""
    takes = inspect.signature(given).parameters
    if key not in takes and not _open(takes):
        raise UserError(f"sweep {what}.{key}: the function that makes the {what} has no argument {key!r}")
    return partial(given, **{key: value})


def _open(takes: Mapping[str, inspect.Parameter]) -> bool:
    return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in takes.values())


def _table(head: str, given: Any, key: str) -> Values:
    """What stands at a key of the top level, as a table."""
    if given is None:
        return {}
    if isinstance(given, Optimizer):
        return config_file.optimizer_table(given)
    if head in ("optimizer", "model") and isinstance(given, str):
        name, options = config_file.named(head, given)
        return {"name": name, **options}
    if isinstance(given, Mapping):
        return dict(given)
    raise UserError(f"sweep {key}: {head} is no table here but {'a module' if head == 'model' else repr(given)}")


def _nested(table: Values, keys: list[str], value: Any, key: str) -> Values:
    inner = table.get(keys[0], {})
    if len(keys) == 1:
        return {**table, keys[0]: value}
    if not isinstance(inner, Mapping):
        raise UserError(f"sweep {key}: {keys[0]!r} is not a table")
    return {**table, keys[0]: _nested(dict(inner), keys[1:], value, key)}


def facts(base: Mapping[str, Any]) -> Values:
    """The shared arguments as plain values, to tell whether a folder is gone on with the same ones."""
    found: Values = {}
    for key, value in base.items():
        if key in ("callbacks", "loggers") or value is None:
            continue
        if isinstance(value, Federation):
            found[key] = {"fingerprint": rows_fingerprint(value)}
        elif isinstance(value, Optimizer):
            found[key] = config_file.optimizer_table(value)
        elif isinstance(value, Task) or (callable(value) and not isinstance(value, Mapping)):
            found[key] = described(value)
        else:
            found[key] = config_file.plain(value)
    return found
