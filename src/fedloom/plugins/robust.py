"""Aggregation that withstands bad clients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

from fedloom.aggregators.robust import krum, median, trimmed_mean
from fedloom.errors import UserError
from fedloom.record import Method
from fedloom.reducers import stack
from fedloom.registry import plugin
from fedloom.types import Leaves


@plugin(
    "0 <= trim < 0.5",
    "bad >= 0",
    "keep >= 1",
    paper="Yin et al., Byzantine-Robust Distributed Learning, ICML 2018; Blanchard et al., Machine Learning with Adversaries, 2017",
)
def robust(
    rule: Literal["median", "trimmed_mean", "krum", "multi_krum"] = "median",
    trim: float = 0.1,
    bad: int = 1,
    keep: int | None = None,
) -> Callable[[Method], Method]:
    """Replaces the mean of the clients' updates by a rule that some bad updates cannot move far.

    ``median`` and ``trimmed_mean`` (without the ``floor(trim M)`` smallest and largest) go coordinate by coordinate; ``krum`` takes
    the update with the smallest sum of squared distances to its ``M - bad - 2`` nearest, ``multi_krum`` the mean of the ``keep`` best.
    Clients count alike, whatever their rows. Buffers are plainly averaged, as ever: use a model without running statistics
    where clients cannot be trusted.

    Args:
        rule: the rule.
        trim: share that ``trimmed_mean`` cuts at each end.
        bad: number of bad clients that Krum reckons with.
        keep: updates that ``multi_krum`` averages; None for M - bad.

    Example:
        >>> import fedloom as fl
        >>> str(fl.compose(fl.fedavg(), fl.robust("median")).reducers()["delta"])
        'stack'
    """
    rules: dict[str, Callable[[Leaves], Leaves]] = {
        "median": median,
        "trimmed_mean": partial(trimmed_mean, trim=trim),
        "krum": partial(krum, bad=bad, keep=1),
        "multi_krum": partial(krum, bad=bad, keep=keep),
    }
    if rule not in rules:
        raise UserError(f"robust: rule={rule!r}; expected {', '.join(rules)}")
    return lambda method: method.replacing_reducer("robust", "delta", stack(rules[rule]))
