"""The upload of a trained model, in delta form."""

from __future__ import annotations

import torch

from fedloom import tensors
from fedloom.spec.parts import Stage
from fedloom.spec.reducers import maximum, mean
from fedloom.spec.seen import Seen
from fedloom.tensors import Leaves, Message


def unchanged(message: Message, memory: Leaves, seen: Seen) -> tuple[Message, Leaves]:
    """For a stage that sends nothing of its own, but has its place in the order, or asks for other reductions."""
    return message, memory


def send_model(weight: str = "n", *, buffers: str = "n", log: bool = False) -> Stage:
    """Sends what the client's training changed in the leaves that travel.

    Three entries: ``delta`` = theta_k - w of the trainable leaves, ``buffers`` the same of floating buffers, ``counters``
    integer buffers as they are (the server takes the maximum). A leaf that is personal in this round is measured from
    the client's own start.

    Args:
        weight: weights q of the mean of ``delta``: ``"n"``, ``"uniform"`` or an uploaded entry.
        buffers: weights of the mean of ``buffers``.
        log: whether uploaded weights are logarithms.
    """

    def fn(message: Message, memory: Leaves, seen: Seen) -> tuple[Message, Leaves]:
        bases: Leaves = {}
        counters: Leaves = {}
        for spec in seen.specs.values():
            if spec.copy != "main" or not spec.sent:
                continue
            if not spec.floating:
                counters[spec.name] = seen.final[spec.name]
                continue
            bases[spec.name] = seen.base(spec.name)
        finals = [seen.final[name] for name in bases]
        moved = tensors.by_list(torch._foreach_sub, torch.sub, finals, list(bases.values()))
        delta: Leaves = {}
        floats: Leaves = {}
        for name, value in zip(bases, moved, strict=True):
            (floats if seen.specs[name].buffer else delta)[name] = value
        message = {**message, "delta": delta}
        if floats:
            message["buffers"] = floats
        if counters:
            message["counters"] = counters
        return message, memory

    entries = {"delta": mean(weight, log=log), "buffers": mean(buffers), "counters": maximum()}
    return Stage(owner="model", fn=fn, entries=entries)
