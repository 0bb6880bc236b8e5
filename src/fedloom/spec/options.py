"""Reader of option tables: plain values to dataclasses, with types, ranges and meanings checked."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from fedloom.errors import UnknownName, UserError
from fedloom.spec import registry
from fedloom.spec.type_check import checked

T = TypeVar("T")


def read(cls: type[T], values: object, where: str) -> T:
    """An options object from plain values, checked: keys, types, ranges.

    Args:
        cls: the dataclass.
        values: a mapping of its fields.
        where: what to call it in messages, such as ``evaluate``; empty for the top level.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass
        ... class Interval:
        ...     every: int = 1
        >>> read(Interval, {"every": 5}, "evaluate").every
        5
    """
    prefix = f"{where}." if where else ""
    if isinstance(values, cls):
        return values
    if not isinstance(values, Mapping):
        raise UserError(f"{where}={values!r}: expected a table of options")
    hints = typing.get_type_hints(cls)
    known = option_names(cls)
    made: dict[str, Any] = {}
    for key, value in values.items():
        if key not in known:
            raise UnknownName(f"option of {where}" if where else "option", str(key), known)
        made[key] = checked(f"{prefix}{key}", value, hints[key])
    for bound in getattr(cls, "BOUNDS", ()):
        numbers = {k: v for k, v in made.items() if isinstance(v, (int, float))}
        registry.check_bound(where or "options", bound, numbers)
    return cls(**made)


def option_names(cls: type[Any]) -> tuple[str, ...]:
    """Names of the options of a class, in order."""
    return tuple(f.name for f in fields(cls))


def default(cls: type[Any], name: str) -> Any:
    """Default of an option."""
    found = next(f for f in fields(cls) if f.name == name)
    if found.default_factory is not MISSING:
        return found.default_factory()
    return found.default


def meanings(of: Callable[..., Any]) -> dict[str, str]:
    """What each argument means, from the ``Args`` of a docstring."""
    text = inspect.getdoc(of) or ""
    block = re.search(r"^Args:\n((?: +.*\n?|\n)+)", text, re.MULTILINE)
    found: dict[str, str] = {}
    last = ""
    for line in (block.group(1) if block else "").splitlines():
        entry = re.match(r"^ {4}(\w+): (.*)$", line)
        if entry:
            last = entry.group(1)
            found[last] = entry.group(2)
        elif line.strip() and last:
            found[last] += " " + line.strip()
    return found
