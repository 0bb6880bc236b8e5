"""Names of methods and plug-ins: a dictionary with manners."""

from __future__ import annotations

import functools
import inspect
import re
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, ParamSpec

from fedloom.errors import UnknownName, UserError
from fedloom.spec.method import Method, Plugin
from fedloom.spec.type_check import fits, words

P = ParamSpec("P")


@dataclass(frozen=True, slots=True)
class Entry:
    """A registered method or plug-in.

    Args:
        name: its name, in Python and in text.
        kind: method or plug-in.
        fn: the public function that makes it.
        summary: first line of its docstring.
        paper: where it comes from.
        bounds: declared ranges of hyper-parameters, as text such as ``mu >= 0``.
        presets: named settings from papers.
        plugin: for methods, the plug-in to use further right in a composition.
    """

    name: str
    kind: Literal["method", "plugin"]
    fn: Callable[..., Any]
    summary: str
    paper: str = ""
    bounds: tuple[str, ...] = ()
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    plugin: str | None = None

    @property
    def parameters(self) -> dict[str, Any]:
        """Hyper-parameters and their defaults (``inspect.Parameter.empty`` where there is none)."""
        return {k: p.default for k, p in inspect.signature(self.fn).parameters.items()}


METHODS: dict[str, Entry] = {}
PLUGINS: dict[str, Entry] = {}
VALUES: dict[str, Callable[..., Any]] = {}
"""Functions that the text form may call in an argument, such as ``gaussian(precision=2)``.

The modules that define them add them."""

_OPERATORS: dict[str, Callable[[Any, float], bool]] = {
    ">=": lambda v, b: v >= b,
    "<=": lambda v, b: v <= b,
    ">": lambda v, b: v > b,
    "<": lambda v, b: v < b,
}


def recipe(
    *bounds: str,
    paper: str = "",
    presets: Mapping[str, Mapping[str, Any]] | None = None,
    plugin: str | None = None,
    force: bool = False,
) -> Callable[[Callable[P, Method]], Callable[P, Method]]:
    """Registers a function that makes a method.

    Args:
        *bounds: ranges of its hyper-parameters, such as ``"mu >= 0"``; None is always allowed.
        paper: where it comes from.
        presets: named settings, chosen by ``preset="name"``.
        plugin: the plug-in that does the same on another method, for error messages.
        force: replace an entry of the same name.
    """

    def wrap(fn: Callable[P, Method]) -> Callable[P, Method]:
        @functools.wraps(fn)
        def make(*args: P.args, **kwargs: P.kwargs) -> Method:
            given = _arguments(entry, args, kwargs)
            return fn(**given).with_complete_text(_text(entry, given))  # type: ignore[call-arg]

        entry = Entry(fn.__name__, "method", make, _first_line(fn), paper, bounds, presets or {}, plugin)
        _register(METHODS, entry, force)
        return make

    return wrap


def plugin(
    *bounds: str, paper: str = "", presets: Mapping[str, Mapping[str, Any]] | None = None, force: bool = False
) -> Callable[[Callable[P, Callable[[Method], Method]]], Callable[P, Plugin]]:
    """Registers a function that makes a plug-in: given hyper-parameters it returns a function from method to method."""

    def wrap(fn: Callable[P, Callable[[Method], Method]]) -> Callable[P, Plugin]:
        @functools.wraps(fn)
        def make(*args: P.args, **kwargs: P.kwargs) -> Plugin:
            given = _arguments(entry, args, kwargs)
            return Plugin(_text(entry, given), fn(**given), registered=True)  # type: ignore[call-arg]

        entry = Entry(fn.__name__, "plugin", make, _first_line(fn), paper, bounds, presets or {})
        _register(PLUGINS, entry, force)
        return make

    return wrap


def list_methods() -> list[str]:
    """Names of all methods, sorted."""
    return sorted(METHODS)


def list_plugins() -> list[str]:
    """Names of all plug-ins, sorted."""
    return sorted(PLUGINS)


def describe(name: str) -> Entry:
    """What is known of a method or plug-in.

    Example:
        >>> import fedloom as fl
        >>> fl.describe("fedprox").parameters
        {'mu': 0.01}
    """
    known = METHODS | PLUGINS
    if name not in known:
        raise UnknownName("method or plug-in", name, known)
    return known[name]


def _register(table: dict[str, Entry], entry: Entry, force: bool) -> None:
    if (entry.name in METHODS or entry.name in PLUGINS) and not force:
        raise UserError(f"the name {entry.name!r} is taken; choose another one, or register with force=True")
    table[entry.name] = entry


def _first_line(fn: Callable[..., Any]) -> str:
    return (inspect.getdoc(fn) or "").split("\n")[0]


def _arguments(entry: Entry, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    rest = dict(kwargs)
    preset = rest.pop("preset", None)
    if preset is not None:
        if not isinstance(preset, str) or preset not in entry.presets:
            raise UnknownName(f"preset of {entry.name}", str(preset), entry.presets)
        rest = {**entry.presets[preset], **rest}
    signature = inspect.signature(entry.fn)
    unknown = [k for k in rest if k not in signature.parameters]
    if unknown:
        raise UnknownName(f"hyper-parameter of {entry.name}", unknown[0], signature.parameters)
    try:
        given = dict(signature.bind(*args, **rest).arguments)
    except TypeError as error:
        takes = ", ".join(signature.parameters) or "none"
        raise UserError(f"{entry.name}: {error}; its hyper-parameters are {takes}") from None
    hints = _hints(entry.fn)
    for key, value in given.items():
        if value is not None and key in hints and not fits(value, hints[key]):
            raise UserError(f"{entry.name}: {key}={value!r}; expected {words(hints[key])}")
    for bound in entry.bounds:
        check_bound(entry.name, bound, given)
    return given


@functools.cache
def _hints(fn: Callable[..., Any]) -> dict[str, Any]:
    """Types of the hyper-parameters; none where an annotation cannot be resolved."""
    try:
        return typing.get_type_hints(fn)
    except NameError:
        return {}


def check_bound(name: str, bound: str, given: Mapping[str, Any]) -> None:
    """Raises where a value is outside ``"mu >= 0"`` or ``"0 < share <= 1"``; a value that is not given or None is inside."""
    parts = re.split(r"\s*(<=|>=|<|>)\s*", bound.strip())
    key = next(p for p in parts[::2] if p.isidentifier() and p not in ("inf",))
    if key not in given or given[key] is None:
        return
    value = given[key]
    good = isinstance(value, (int, float)) and not isinstance(value, bool)
    mirrored = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}
    if good and parts[0] != key:
        good = _OPERATORS[mirrored[parts[1]]](value, float(parts[0]))
        parts = parts[2:]
    if good and len(parts) == 3:
        good = _OPERATORS[parts[1]](value, float(parts[2]))
    if not good:
        raise UserError(f"{name}: {key}={value!r} is out of range; expected {bound}")


def _text(entry: Entry, given: Mapping[str, Any]) -> str:
    return f"{entry.name}({', '.join(f'{k}={_literal(v)}' for k, v in given.items())})"


def _literal(value: Any) -> str:
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return "inf" if value > 0 else "-inf"
    return repr(value)
