"""Padding of unequal clients: how much is computed for rows that are not there."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedloom.data import Rows
from fedloom.engines.vectorised.rows import JoinedRows, training_schedule


@pytest.mark.parametrize("cohort", [10, 50])
def test_unequal_clients_waste_at_most_fifteen_percent(cohort: int) -> None:
    draw = np.random.default_rng(0)
    shares = np.stack([draw.dirichlet([0.1] * 100) for _ in range(10)])
    sizes = np.maximum(10, (shares * 5000).sum(0)).astype(int)
    computed = real = 0
    for _ in range(20):
        chosen = np.sort(draw.choice(sizes, cohort, replace=False))[::-1]
        rows = [Rows(torch.zeros(n, 1), torch.zeros(n, dtype=torch.long)) for n in chosen]
        plans = [[(np.arange(i, min(i + 64, n)),) for i in range(0, n, 64)] for n in chosen]
        schedule = training_schedule(JoinedRows.of(rows), plans, torch.float32, "narrow")
        computed += sum(t.clients * t.widths[0] for t in schedule.slots)
        real += int(chosen.sum())
    assert computed <= 1.15 * real
