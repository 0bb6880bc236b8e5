"""How a function of one client becomes one of a wave: the one place where ``vmap`` is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fedloom.engines.vectorised import attention


def over_clients(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn`` for tensors with a leading client axis; every client draws noise of its own."""
    mapped = torch.vmap(fn, randomness="different")

    def call(*args: Any) -> Any:
        with attention.whole():
            return mapped(*args)

    return call
