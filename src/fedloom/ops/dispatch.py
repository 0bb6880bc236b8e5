"""Dispatch of operators to faster implementations. No other module looks one up.

``@operator`` decorates the plain form of an operator: readers read it, CPUs compute it, tests
compare with it. :func:`register` adds faster implementations. An implementation returns None for
arguments that it does not support; then the plain form computes the result. Implementations do not
support the tensors of a trace.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton's switch: the kernels run in an interpreter on a CPU, slowly, for tests and debugging."""

_plain: dict[str, Callable[..., Any]] = {}
_faster: dict[str, Callable[..., Any]] = {}


def operator(plain: Callable[P, R]) -> Callable[P, R]:
    """Declare a function as the plain form of an operator; its name is the operator's."""
    name = plain.__name__
    assert name not in _plain, f"operator {name!r} exists already"
    _plain[name] = plain

    @wraps(plain)
    def call(*args: P.args, **named: P.kwargs) -> R:
        faster = _faster.get(name)
        result = None if faster is None else faster(*args, **named)
        return plain(*args, **named) if result is None else result

    return call


def register(*implementations: Callable[..., Any]) -> None:
    """Register faster implementations, each for the operator of its name.

    An implementation takes the operator's arguments and returns None for those that it does not support.
    """
    names = {function.__name__: function for function in implementations}
    unknown = names.keys() - _plain.keys()
    assert not unknown, f"no operators: {', '.join(sorted(unknown))}"
    _faster.update(names)
