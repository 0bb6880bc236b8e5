"""Checks of values against type annotations, and of files against the format number."""

from __future__ import annotations

import collections.abc
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal

from fedloom.errors import UserError

_UNIONS = (typing.Union, types.UnionType)
_LISTS = (tuple, list, collections.abc.Sequence)
_WORDS: dict[Any, str] = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


def checked(name: str, value: Any, hint: Any) -> Any:
    """The value as the type says (whole numbers become numbers, lists tuples), or an error that says what was expected.

    Example:
        >>> checked("lr", 1, float)
        1.0
    """
    good, made = _fitted(value, hint)
    if not good:
        raise UserError(f"{name}={value!r}: expected {words(hint)}")
    return made


def fits(value: Any, hint: Any) -> bool:
    """Whether a value is of a type."""
    return _fitted(value, hint)[0]


def words(hint: Any) -> str:
    """A type in words.

    Example:
        >>> words(int | Literal["full"])
        "a whole number or 'full'"
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in _UNIONS:
        rest = [a for a in args if a is not type(None)]
        return "a number" if set(rest) == {int, float} else " or ".join(words(a) for a in rest)
    if origin is Literal:
        return " or ".join(repr(a) for a in args)
    if origin in _LISTS:
        many = f"{len(args)} values, each" if origin is tuple and args[-1] is not Ellipsis else "a list of"
        return f"{many} {words(args[0])}"
    if origin in (dict, collections.abc.Mapping):
        return "a table"
    return _WORDS.get(hint, getattr(hint, "__name__", "a table"))


def _fitted(value: Any, hint: Any) -> tuple[bool, Any]:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in _UNIONS:
        tries = [_fitted(value, a) for a in sorted(args, key=lambda a: a is float)]
        return next((t for t in tries if t[0]), (False, None))
    if origin is Literal:
        return any(value == a and type(value) is type(a) for a in args), value
    if origin in _LISTS:
        return _listed(value, args, fixed=origin is tuple and args[-1] is not Ellipsis)
    if origin in (dict, collections.abc.Mapping):
        return isinstance(value, Mapping), value
    if origin is collections.abc.Callable:
        return callable(value), value
    if hint is float:
        good = isinstance(value, (int, float)) and not isinstance(value, bool) and not _too_large(value)
        return (True, float(value)) if good else (False, None)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63, value
    if isinstance(hint, type):
        return isinstance(value, hint), value
    return True, value


def _listed(value: Any, args: tuple[Any, ...], *, fixed: bool) -> tuple[bool, Any]:
    if not isinstance(value, (list, tuple)) or (fixed and len(value) != len(args)):
        return False, None
    parts = [_fitted(v, args[i] if fixed else args[0]) for i, v in enumerate(value)]
    return all(good for good, _ in parts), tuple(v for _, v in parts)


def _too_large(value: float) -> bool:
    return math.isnan(value) or (isinstance(value, int) and abs(value) > 10**300)
