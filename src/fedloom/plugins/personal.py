"""Leaves that stay with their client."""

from __future__ import annotations

from collections.abc import Callable

from fedloom.errors import UserError
from fedloom.spec.method import Method
from fedloom.spec.parts import Rule
from fedloom.spec.registry import plugin


@plugin()
def personal(pattern: str | tuple[str, ...] = "head") -> Callable[[Method], Method]:
    """Makes leaves personal: they are neither received nor sent, ever.

    Args:
        pattern: ``"head"``, ``"body"``, ``"norm"``, a glob on dotted names such as ``"layer4.*"``, or several of them. A pattern
            that matches no leaf of the model is an error.

    Example:
        >>> import fedloom as fl
        >>> print(fl.compose(fl.fedavg(), fl.personal("norm")))
        fedavg() + personal(pattern='norm')
    """
    patterns = tuple(pattern) if isinstance(pattern, (list, tuple)) else pattern
    if not patterns or not all(
        isinstance(p, str) and p for p in ([patterns] if isinstance(patterns, str) else patterns)
    ):
        raise UserError(f"personal: expected a pattern such as 'head' or 'layer4.*', got {pattern!r}")
    return lambda method: method.adding(rules=(Rule(owner="personal", pattern=patterns, kind="personal"),))
