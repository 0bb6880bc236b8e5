"""The one place that looks up a faster implementation of a formula.

``@operator`` stands on the plain formula, which is what a reader reads, what a CPU computes and what tests compare with. Faster ones are
registered by name, all in one file of :mod:`fedloom.gpu`, when a network is made for a device that has kernels. A faster one returns None
where it does not serve these arguments; the plain formula is computed then. Nothing is looked up in a graph that is traced: implementations say no to the
tensors of a trace.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

KERNELS = "fedloom.gpu"
"""The package of faster implementations; without it the plain formulas serve everywhere."""
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton's own switch: kernels are interpreted on a CPU, slowly, to test or debug them."""

_plain: dict[str, Callable[..., Any]] = {}
_faster: dict[str, Callable[..., Any]] = {}


def operator(plain: Callable[P, R]) -> Callable[P, R]:
    """A plain formula of which a device may have a faster implementation."""
    name = plain.__name__
    assert name not in _plain, f"there is an operator {name!r} already"
    _plain[name] = plain

    @wraps(plain)
    def call(*args: P.args, **named: P.kwargs) -> R:
        faster = _faster.get(name)
        made = None if faster is None else faster(*args, **named)
        return plain(*args, **named) if made is None else made

    return call


def register(implementations: Mapping[str, Callable[..., Any]]) -> None:
    """Enters faster implementations: each takes an operator's arguments, and returns None where it does not serve."""
    unknown = implementations.keys() - _plain.keys()
    assert not unknown, f"no operators: {', '.join(sorted(unknown))}"
    _faster.update(implementations)


def prepare_for(device: torch.device) -> None:
    """Enters the implementations for a device, if there are any: on CUDA, those of :data:`KERNELS`."""
    if not _faster and (device.type == "cuda" or INTERPRETED) and importlib.util.find_spec(KERNELS) is not None:
        importlib.import_module(f"{KERNELS}.register").register()
