"""Leaves that do not train."""

from __future__ import annotations

from collections.abc import Callable

from fedloom.errors import UserError
from fedloom.spec.method import Method
from fedloom.spec.parts import Rule
from fedloom.spec.registry import plugin


@plugin()
def freeze(pattern: str | tuple[str, ...]) -> Callable[[Method], Method]:
    """Freezes leaves: they keep their initial values, are not trained and not sent.

    For a pre-trained body, say. Running statistics of a frozen normalisation stay as they are between rounds too. A pattern that
    matches no leaf of the model is an error.

    Args:
        pattern: ``"head"``, ``"body"``, ``"norm"``, a glob on dotted names such as ``"layer1.*"``, or several of them.

    Example:
        >>> import fedloom as fl
        >>> print(fl.compose(fl.fedavg(), fl.freeze("body")))
        fedavg() + freeze(pattern='body')
    """
    patterns = tuple(pattern) if isinstance(pattern, (list, tuple)) else (pattern,)
    if not patterns or not all(isinstance(p, str) and p for p in patterns):
        raise UserError(f"freeze: expected a pattern such as 'body' or 'layer1.*', got {pattern!r}")
    return lambda method: method.adding(rules=(Rule(owner="freeze", pattern=patterns, kind="frozen"),))
