"""The cells of a comparison: which method, which seed, which values of the swept options."""

from __future__ import annotations

import hashlib
import inspect
import itertools
import re
import tomllib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from fedloom.api import fit
from fedloom.errors import UnknownName, UserError
from fedloom.runs import config_file
from fedloom.spec import text_form
from fedloom.spec.method import Method
from fedloom.spec.optimizer import Optimizer

Methods = Sequence[str | Method] | Mapping[str, str | Method] | str
Values = dict[str, Any]

MOST = 100_000
"""Cells of a comparison at most; more is a slip of the pen."""

OPTIONS = frozenset(inspect.signature(fit).parameters) - {
    "method",
    "model",
    "data",
    "seed",
    "out",
    "resume",
    "progress",
}
"""Options of ``fit`` that a comparison passes on."""


def methods_of(given: Methods) -> dict[str, Method]:
    """Methods by label, in order.

    Example:
        >>> list(methods_of("fedavg; fedavg + isr(points=2)"))
        ['fedavg', 'fedavg + isr(points=2)']
    """
    if isinstance(given, str):
        given = [part.strip() for part in given.split(";") if part.strip()]
    if isinstance(given, Mapping):
        pairs = [(str(k), v) for k, v in given.items()]
    elif isinstance(given, Sequence):
        pairs = [(m.text if isinstance(m, Method) else str(m).strip(), m) for m in given]
    else:
        raise UserError(f"methods={given!r}: expected a list such as ['fedavg', 'fedavg + isr'] or a mapping of labels")
    made: dict[str, Method] = {}
    for label, method in pairs:
        if label in made:
            raise UserError(f"methods: {label!r} is there twice; leave one out, or give a mapping with two labels")
        made[label] = text_form.method(method)
    if not made:
        raise UserError("methods: expected at least one, such as 'fedavg; fedavg + isr'")
    return made


def seeds_of(given: int | Sequence[int] | str) -> tuple[int, ...]:
    """Seeds from a number of them, a list, or text such as ``0,1,2`` or ``0-9``.

    Example:
        >>> seeds_of(3), seeds_of("0-2,7")
        ((0, 1, 2), (0, 1, 2, 7))
    """
    if isinstance(given, str):
        found: list[int] = []
        for part in given.split(","):
            span = re.fullmatch(r"\s*(\d+)(?:\s*-\s*(\d+))?\s*", part)
            if span is None or (span[2] and not 0 <= int(span[2]) - int(span[1]) < MOST):
                raise UserError(f"seeds {given!r}: expected numbers such as 0,1,2 or a range such as 0-9")
            found += range(int(span[1]), int(span[2] or span[1]) + 1)
        given = found
    elif isinstance(given, int) and not isinstance(given, bool):
        if not 1 <= given <= MOST:
            raise UserError(f"seeds={given}: expected the number of seeds, at least 1, or a list of seeds")
        given = range(given)
    seeds: tuple[int, ...] = () if isinstance(given, int) else tuple(given)
    if not seeds or any(isinstance(s, bool) or not isinstance(s, int) or s < 0 for s in seeds):
        raise UserError(f"seeds={given!r}: expected whole numbers of at least 0")
    if len(set(seeds)) < len(seeds):
        raise UserError(f"seeds={list(seeds)}: a seed is there twice; the same run again says nothing new")
    return seeds


def sweeps_of(given: Mapping[str, Sequence[Any]] | Sequence[str] | None) -> dict[str, list[Any]]:
    """Swept options and their values, from a mapping or from texts such as ``data.alpha=0.1,0.3``.

    Example:
        >>> sweeps_of(["data.alpha=0.1,0.3", "optimizer=sgd(lr=0.1, momentum=0.9),adam"])
        {'data.alpha': [0.1, 0.3], 'optimizer': ['sgd(lr=0.1, momentum=0.9)', 'adam']}
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        pairs = [_sweep(text) for text in given]
        for key, _ in pairs:
            if [k for k, _ in pairs].count(key) > 1:
                raise UserError(f"--sweep {key} is there twice; give all its values at once, such as {key}=1,2,3")
        given = dict(pairs)
    made: dict[str, list[Any]] = {}
    for key, values in given.items():
        head = key.partition(".")[0]
        if head in ("seed", "method"):
            raise UserError(f"sweep {key!r}: methods and seeds have options of their own, methods and seeds")
        if head not in ("data", "model", *OPTIONS):
            raise UnknownName("option to sweep", head, ("data", "model", *OPTIONS))
        if isinstance(values, str) or not isinstance(values, Sequence) or not values:
            raise UserError(f"sweep {key!r}: expected a list of values, got {values!r}")
        made[key] = list(values)
        if len({shown(v) for v in values}) < len(values):
            raise UserError(f"sweep {key!r}: a value is there twice in {made[key]}")
    return made


def _sweep(text: str) -> tuple[str, list[Any]]:
    key, found, values = text.partition("=")
    parts = split(values)
    if not found or not key.strip() or not all(parts):
        raise UserError(f"--sweep {text!r}: expected key=value,value,... such as data.alpha=0.1,0.3")
    return key.strip(), [_literal(p) for p in parts]


def split(text: str) -> list[str]:
    """Text cut at the commas that stand in no brackets and no quotes.

    Example:
        >>> split("dirichlet(0.1, min_size=2), iid")
        ['dirichlet(0.1, min_size=2)', 'iid']
    """
    parts, depth, quote = [""], 0, ""
    for c in text:
        if quote:
            quote = "" if c == quote else quote
        elif c in "'\"":
            quote = c
        depth += 0 if quote else (c in "([{") - (c in ")]}")
        if c == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += c
    return [p.strip() for p in parts]


def _literal(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError, ValueError, KeyError):
        return text


def combinations(sweep: Mapping[str, Sequence[Any]]) -> list[Values]:
    """Every combination of the swept values; one empty combination where nothing is swept."""
    return [dict(zip(sweep, values, strict=True)) for values in itertools.product(*sweep.values())]


def shown(value: Any) -> str:
    """A value as it stands in tables and names.

    Example:
        >>> shown(0.1), shown("iid"), shown([64, 64])
        ('0.1', 'iid', '[64, 64]')
    """
    if isinstance(value, (bool, int, float, str)):
        return str(value)
    if isinstance(value, Optimizer):
        table = config_file.optimizer_table(value)
        return f"{table.pop('name')}({', '.join(f'{k}={v}' for k, v in table.items())})"
    return str(config_file.plain(value)) if isinstance(value, (list, tuple, Mapping)) else described(value)


def described(value: Any) -> str:
    """Something given in Python, by name."""
    if isinstance(value, partial):
        given = [*map(repr, value.args), *(f"{k}={v!r}" for k, v in value.keywords.items())]
        return f"{described(value.func)}({', '.join(given)})"
    return str(getattr(value, "__qualname__", None) or getattr(value, "name", None) or type(value).__name__)


def plain(value: Any) -> Any:
    """A value as JSON can hold it; what was given in Python is named."""
    return (
        config_file.plain(value) if isinstance(value, (bool, int, float, str, list, tuple, Mapping)) else shown(value)
    )


def setting(options: Mapping[str, Any]) -> str:
    """A combination of swept values in one line.

    Example:
        >>> setting({"data.alpha": 0.1, "epochs": 5})
        'data.alpha=0.1, epochs=5'
    """
    return ", ".join(f"{k}={shown(v)}" for k, v in options.items())


def folder_of(label: str, options: Mapping[str, Any], seed: int) -> str:
    """The name of a cell's folder: readable, safe on every system, and the same for the same cell.

    Example:
        >>> folder_of("fedavg + isr(points=3)", {"data.alpha": 0.1}, 0)
        'fedavg+isr-points=3_data.alpha=0.1_seed=0'
    """
    words = "_".join([label, *(f"{k}={shown(v)}" for k, v in options.items())])
    plain = re.sub(r"[(,]+", "-", re.sub(r"[\s)]|\(\)", "", words))
    safe = re.sub(r"[^\w.=+-]", "~", plain, flags=re.ASCII).strip(".") or "~"
    if "~" in safe or len(safe) > 100:
        safe = f"{safe[:90]}.{hashlib.sha256(words.encode()).hexdigest()[:8]}"
    return f"{safe}_seed={seed}"
