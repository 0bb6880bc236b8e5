"""Who takes part in a round."""

from __future__ import annotations

import math

from fedloom import rng
from fedloom.errors import UserError


def cohort_size(cohort: float | int, clients: int) -> int:
    """Number of clients in a round: a fraction (float) or a number (int).

    Example:
        >>> cohort_size(0.1, 7), cohort_size(0.25, 10), cohort_size(1, 10), cohort_size(1.0, 10)
        (1, 3, 1, 10)
    """
    if isinstance(cohort, bool) or not isinstance(cohort, (int, float)):
        raise UserError(f"cohort={cohort!r}: expected a fraction such as 0.1 or a number of clients such as 10")
    if isinstance(cohort, int):
        if not 1 <= cohort <= clients:
            raise UserError(f"cohort={cohort}: expected 1 to {clients} clients, or a fraction in (0, 1]")
        return cohort
    if not 0 < cohort <= 1:
        raise UserError(f"cohort={cohort}: a fraction must be in (0, 1]; give an int for a number of clients")
    return max(1, math.floor(cohort * clients + 0.5))


def sample(seed: int, round: int, ids: tuple[str, ...], size: int) -> tuple[str, ...]:
    """Uniform, without replacement, then in federation order."""
    if size >= len(ids):
        return ids
    chosen = rng.stream(seed, "sample", round).choice(len(ids), size=size, replace=False)
    return tuple(ids[i] for i in sorted(chosen))
