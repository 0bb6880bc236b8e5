"""What is known of a model: its leaves, its layers, the order of its modules."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from fedloom.spec.seen import TapName


@dataclass(frozen=True, slots=True)
class LeafInfo:
    """One leaf of a model, by its name within its copy.

    Args:
        name: dotted name, or ``owner:name`` for leaves that a plug-in brought.
        module: name of the module that owns it.
        trainable: whether a gradient step may move it.
        buffer: whether it is a buffer (running statistics, counters).
        norm: whether it belongs to a batch normalisation, by type.
        role: ``"head"``, ``"body"``, or ``"none"`` for extra leaves that only a phase of their own trains.
        shape: its shape.
        owner: the plug-in that brought it, or empty.
        key: the static key of the clients that train it; None for all.
    """

    name: str
    module: str
    trainable: bool
    buffer: bool
    norm: bool
    role: Literal["head", "body", "none"]
    shape: torch.Size
    owner: str = ""
    key: int | None = None


Pattern = str | tuple[str, ...] | Callable[[LeafInfo], bool]
"""Which leaves: ``"all"``, ``"head"``, ``"body"``, ``"norm"``, a glob on dotted names, several, or a test."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a module in the forward pass of the sample."""

    name: str
    kind: str
    shape: torch.Size
    weighted: bool


@dataclass(frozen=True, slots=True)
class Structure:
    """What is known of a model before round one.

    Args:
        leaves: its leaves, in order; extra leaves of plug-ins after the model's own.
        calls: its modules in the order in which the forward pass calls them.
        head: name of the head's module, or None where none was found.
        feature: size of the head's input (its last axis for vectors, its channels for maps), or None.
        outputs: width of the output (number of classes in classification).
        task: name of the task.
        tap_points: the model's own list of places to tap, if it has one.
        blocks: the model's own list of blocks, if it has one.
        dtype: floating type of the run.
        inputs: shape of one row of input, or None where inputs are several tensors.
    """

    leaves: tuple[LeafInfo, ...]
    calls: tuple[Call, ...]
    head: str | None
    feature: int | None
    outputs: int
    task: str
    tap_points: tuple[str, ...] = ()
    blocks: tuple[str, ...] = ()
    dtype: torch.dtype = torch.float32
    inputs: torch.Size | None = None

    def layers(self) -> dict[str, tuple[str, ...]]:
        """Weight layers of the user's model in forward order, without normalisation: module -> its trainable leaves."""
        found: dict[str, list[str]] = {}
        for leaf in self.leaves:
            if leaf.trainable and not leaf.buffer and not leaf.norm and not leaf.owner:
                found.setdefault(leaf.module, []).append(leaf.name)
        order = {call.name: i for i, call in reversed(list(enumerate(self.calls)))}
        return {m: tuple(found[m]) for m in sorted(found, key=lambda m: order.get(m, len(order)))}

    def trainable(self) -> tuple[str, ...]:
        """Names of the user's trainable leaves."""
        return tuple(i.name for i in self.leaves if i.trainable and not i.owner)


TapChooser = tuple[TapName, ...] | Callable[[Structure], tuple[TapName, ...]]
"""Names of the modules to tap, or a function that chooses them."""


def matches(pattern: Pattern, leaf: LeafInfo) -> bool:
    """Whether a leaf is meant by a pattern."""
    if callable(pattern):
        return pattern(leaf)
    if isinstance(pattern, tuple):
        return any(matches(p, leaf) for p in pattern)
    if pattern == "all":
        return leaf.role != "none"
    if pattern == "norm":
        return leaf.norm
    if pattern in ("head", "body"):
        return leaf.role == pattern
    return fnmatch.fnmatchcase(leaf.name, pattern)
