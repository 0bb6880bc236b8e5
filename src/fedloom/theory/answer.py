"""What a calculator returns: a number, the conditions it rests on, and the paper's claims about it, checked.

Numbers may be arrays wherever a plot wants a curve: they broadcast as numpy's do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedloom.errors import UserError

FloatArray: TypeAlias = NDArray[np.float64]
BoolArray: TypeAlias = NDArray[np.bool_]
Real: TypeAlias = float | FloatArray
Vector: TypeAlias = Sequence[float] | FloatArray
Mode: TypeAlias = Literal["paper", "sound"]


@dataclass(frozen=True, slots=True, eq=False)
class Condition:
    """A statement about the inputs or the result, and whether it holds (an array along a curve)."""

    name: str
    holds: bool | BoolArray

    @property
    def everywhere(self) -> bool:
        """Whether it holds at every point."""
        return bool(np.all(self.holds))


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """A calculator's result.

    Attributes:
        name: what was computed, with the paper's equation.
        value: the number; `inf` where no finite bound exists, `nan` where the formula has no meaning.
        mode: `paper` (as printed), `sound` (corrected), or None where the two agree.
        conditions: what the value needs in order to mean something.
        claims: what the paper states about it, tried on these numbers.
        terms: the parts of the value, and numbers that come with it.
        reason: why the value is `inf` or `nan`; empty when it is finite.
    """

    name: str
    value: Real
    mode: Mode | None = None
    conditions: tuple[Condition, ...] = ()
    claims: tuple[Condition, ...] = ()
    terms: Mapping[str, Real] = field(default_factory=dict)
    reason: str = ""

    @property
    def valid(self) -> bool:
        """Whether the value is finite and every condition holds, at every point."""
        return bool(np.all(np.isfinite(self.value))) and all(c.everywhere for c in self.conditions)

    def __float__(self) -> float:
        return float(self.value)

    def summary(self) -> str:
        """The whole answer as a few lines of text."""
        lines = [f"{self.name}{f' [{self.mode}]' if self.mode else ''} = {show(self.value)}"]
        lines += [f"  {name}: {show(term)}" for name, term in self.terms.items()]
        lines += [f"  needs {c.name}: {_verdict(c, 'yes', 'NO')}" for c in self.conditions]
        lines += [f"  paper: {c.name}: {_verdict(c, 'holds', 'does not hold')}" for c in self.claims]
        if self.reason:
            lines.append(f"  because {self.reason}")
        return "\n".join(lines)


def show(value: Real) -> str:
    """A number, or an array, in six significant digits."""
    return np.array2string(np.asarray(value), formatter={"float_kind": lambda x: f"{x:.6g}"})


def _verdict(condition: Condition, yes: str, no: str) -> str:
    if np.ndim(condition.holds) == 0 or condition.everywhere:
        return yes if condition.everywhere else no
    return f"at {int(np.sum(condition.holds))} of {np.size(condition.holds)} points"


def plain(value: Any) -> Any:
    """A Python number for a zero-dimensional array, anything else unchanged."""
    return value.item() if isinstance(value, np.ndarray | np.generic) and np.ndim(value) == 0 else value


def answer(
    name: str,
    value: Any,
    *,
    mode: Mode | None = None,
    conditions: Iterable[tuple[str, Any]] = (),
    claims: Iterable[tuple[str, Any]] = (),
    terms: Mapping[str, Any] | None = None,
    because: Iterable[tuple[Any, str]] = (),
) -> Answer:
    """Build an `Answer`; `because` pairs a mask of points that are not finite with the reason."""
    reasons = []
    for mask, text in because:
        count, size = int(np.sum(mask)), int(np.size(mask))
        if count:
            reasons.append(text if size == 1 else f"at {count} of {size} points {text}")
    return Answer(
        name=name,
        value=plain(value),
        mode=mode,
        conditions=tuple(Condition(n, plain(np.asarray(h))) for n, h in conditions),
        claims=tuple(Condition(n, plain(np.asarray(h))) for n, h in claims),
        terms={n: plain(t) for n, t in (terms or {}).items()},
        reason="; ".join(reasons),
    )


def real(
    name: str,
    value: Any,
    *,
    low: float = 0.0,
    high: float = np.inf,
    open_low: bool = False,
    endless: bool = False,
) -> Any:
    """The value as float64, refused outside `[low, high]` (or `(low, high]`), when not a number, or infinite.

    Example:
        >>> real("a", -1.0, open_low=True)
        Traceback (most recent call last):
        ...
        fedloom.errors.UserError: a = -1 is out of range: expected a finite number > 0. Change a.
    """
    try:
        array = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        raise UserError(f"{name} = {value!r} is not a number. Give {name} as a number.") from None
    bad = np.isnan(array) | (array > high) | ((array <= low) if open_low else (array < low))
    bad |= np.isinf(array) & (not endless)
    if np.any(bad):
        limits = [(low, ">" if open_low else ">="), (high, "<=")]
        wanted = " and ".join(f"{sign} {limit:g}" for limit, sign in limits if np.isfinite(limit))
        kind = f"{'' if endless else 'finite '}number {wanted}".rstrip()
        given = show(array[bad][0])
        raise UserError(f"{name} = {given} is out of range: expected a {kind}. Change {name}.")
    return array


def positive(name: str, value: Any) -> Any:
    """The value as float64, which must be above 0."""
    return real(name, value, open_low=True)


def check_mode(mode: str) -> None:
    """Refuse any mode but `paper` and `sound`."""
    if mode not in ("paper", "sound"):
        raise UserError(f"mode = {mode!r} is unknown: expected 'paper' (as printed) or 'sound' (corrected).")
