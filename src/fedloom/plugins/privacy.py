"""Clipping and noise on what a client sends."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fedloom import rng, tree
from fedloom.record import Method
from fedloom.registry import plugin
from fedloom.slots import Stage
from fedloom.types import Leaves, Message, Seen

_PAPER = "McMahan et al., Learning Differentially Private Recurrent Language Models, ICLR 2018"


@plugin("norm > 0", paper=_PAPER)
def clip(norm: float = 1.0) -> Callable[[Method], Method]:
    """Shortens a client's update to a norm: ``d <- d min(1, C / ||d||)``.

    The norm is over all trainable leaves of the update jointly; buffers are left alone.

    Args:
        norm: the bound C.
    """

    def fn(message: Message, memory: Leaves, seen: Seen) -> tuple[Message, Leaves]:
        if not message.get("delta"):
            return message, memory
        length = tree.square_norm(message["delta"]).sqrt()
        factor = torch.where(length > norm, norm / length, torch.ones_like(length))
        return {**message, "delta": tree.scale(message["delta"], factor)}, memory

    return lambda method: method.adding(stages=(Stage(owner="clip", fn=fn),))


@plugin("sigma >= 0", paper=_PAPER)
def noise(sigma: float = 1.0) -> Callable[[Method], Method]:
    """Adds Gaussian noise to a client's update: ``d <- d + sigma N(0, I)``.

    The noise is counter-based, hence the same on every engine. After ``clip`` it is the Gaussian mechanism with noise
    multiplier sigma / C; before ``clip`` it is refused.

    Args:
        sigma: standard deviation of each coordinate.
    """

    def fn(message: Message, memory: Leaves, seen: Seen) -> tuple[Message, Leaves]:
        key = rng.fold(seen.noise, _STREAM)
        noisy = {
            name: value + sigma * rng.normal(rng.fold(key, i), tuple(value.shape)).to(value)
            for i, (name, value) in enumerate(message.get("delta", {}).items())
        }
        return ({**message, "delta": noisy} if noisy else message), memory

    stage = Stage(owner="noise", fn=fn, follows=("clip",))
    return lambda method: method.adding(stages=(stage,)) if sigma else method


_STREAM = 0x6E6F6973  # keeps this noise apart from dropout's, which folds step numbers into the same key
