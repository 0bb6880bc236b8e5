"""Functions that make data and networks, found by name in other processes."""

from __future__ import annotations

import os
from pathlib import Path

from torch import nn

import fedloom as fl
from tests.helpers import federation


def rows(seed: int, shift: int = 0) -> fl.Federation:
    return federation(sizes=(9, 14, 5), seed=seed + 100 * shift)


def net(hidden: int = 5) -> nn.Module:
    return nn.Sequential(nn.Linear(6, hidden), nn.Tanh(), nn.Linear(hidden, 3))


def deadly(seed: int, marks: str) -> fl.Federation:
    """Ends its process, as a system without memory would: for seed 1 the first time, for seed 2 every time."""
    mark = Path(marks) / "died"
    if seed == 2 or (seed == 1 and not mark.exists()):
        mark.touch()
        os._exit(9)
    return rows(seed)
