"""The exceptions of fedloom.

FedloomError
├── UserError (ValueError)      something given to fedloom is wrong; one clear line, exit status 2
│   ├── UnknownName             a name that no registry knows; suggests near ones
│   ├── Conflict                parts of a method that cannot stand together
│   └── NotVectorisable         a model or method that the vectorised engine cannot run
└── RunError (RuntimeError)     a run that cannot go on; exit status 1
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FedloomError(Exception):
    """Base of every error that fedloom raises on purpose."""


class UserError(FedloomError, ValueError):
    """A user's mistake: says what was given, what was expected and what to do."""


class UnknownName(UserError):
    """A name that is not registered.

    Example:
        >>> raise UnknownName("method", "fedpox", ["fedavg", "fedprox"])
        Traceback (most recent call last):
        ...
        fedloom.errors.UnknownName: unknown method 'fedpox'. Did you mean 'fedprox'?
    """

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        known = sorted(known)
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
        if near:
            hint = "Did you mean " + " or ".join(repr(n) for n in near) + "?"
        else:
            hint = f"Known: {', '.join(known)}."
        super().__init__(f"unknown {kind} {name!r}. {hint}")


class Conflict(UserError):
    """Two parts of a composition that cannot stand together, with the reason."""


class NotVectorisable(UserError):
    """A model or a method that cannot be run for a whole cohort at once, with the reason."""


class RunError(FedloomError, RuntimeError):
    """A run that cannot go on, through no fault of the configuration."""
