"""How many tensor operations a round takes besides captured steps."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fedloom.engines.vectorised import VectorisedEngine
from tests.helpers import bn_mlp, federation, fit

DATA = federation((64, 64, 64, 64, 64, 64))
OPTIONS = {"device": "cpu", "cohort": 4, "epochs": 1, "batch_size": 64, "evaluate": {"every": 0}, "rounds": 6}


class Calls(TorchDispatchMode):
    """Counts tensor operations; those that read a number of the host are none of the device's."""

    def __init__(self) -> None:
        super().__init__()
        self.made: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten._local_scalar_dense.default:
            self.made[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("method", ["fedavg", "fedavg + lag(k=1)"])
def test_a_further_client_costs_a_round_few_operations(method: str) -> None:
    """Two sums, whatever the leaves: what clients keep, send and have is made for all of them at once."""

    def of_a_round(cohort: int) -> int:
        found, calls = list[int](), Calls()

        def after(record: Any) -> None:
            found.append(calls.made.total())

        options = {**OPTIONS, "cohort": cohort, "callbacks": [after]}
        with calls:
            fit(method, bn_mlp(), DATA, engine=VectorisedEngine(step="graphed"), **options)
        return found[4] - found[3]

    assert of_a_round(6) - of_a_round(3) <= 3 * 2
