"""Smaller updates: the largest entries only, or fewer bits per entry."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from fedloom import rng, tensors
from fedloom.errors import UserError
from fedloom.spec.leaves import Facts
from fedloom.spec.method import Method
from fedloom.spec.parts import Stage
from fedloom.spec.registry import plugin
from fedloom.spec.seen import Seen
from fedloom.tensors import Leaves, Message

OWNER = "compress"

_STREAM = 0x636F6D70  # keeps this noise apart from that of dropout and of the noise plug-in, which fold the same key


def kept(numel: int, share: float) -> int:
    """Entries of a leaf that top-k keeps: ``ceil(share numel)``."""
    return math.ceil(share * numel)


def largest(value: Tensor, share: float) -> Tensor:
    """The entries of largest magnitude, zero elsewhere; among equals the earlier one.

    Equal is what agrees to a few bits less than numbers have: gradients of two classes are each other's negatives, but for
    rounding, which differs from processor to processor.
    """
    if not value.numel():
        return value
    flat = value.reshape(-1)
    size = flat.abs()
    grain = 16 * torch.finfo(value.dtype).eps * size.amax()
    steps = torch.where(grain > 0, (size / grain).round(), size)
    rank = steps.sort(descending=True, stable=True)[1].argsort()
    return torch.where(rank < kept(flat.numel(), share), flat, torch.zeros_like(flat)).reshape(value.shape)


def quantised(value: Tensor, bits: int, key: Tensor) -> Tensor:
    """``s/L round(v L/s)`` with ``s = max|v|``, ``L = 2^(bits-1) - 1``, rounded up or down at random so that the mean is v."""
    if not value.numel():
        return value
    levels = 2 ** (bits - 1) - 1
    scale = value.abs().amax()
    unit = torch.where(scale > 0, scale / levels, torch.ones_like(scale))
    noise = rng.uniform(key, tuple(value.shape), value.dtype)
    return (value / unit + noise).floor().clamp(-levels, levels) * unit


def sparse_bytes(entry: Leaves, share: float) -> int:
    """Bytes of top-k leaves: values and 32-bit positions (64 in huge leaves), or the plain leaf where that is smaller."""
    total = 0
    for value in entry.values():
        count, size = value.numel(), value.element_size()
        position = 4 if count <= 2**32 else 8
        total += min(count * size, kept(count, share) * (size + position))
    return total


def packed_bytes(entry: Leaves, bits: int) -> int:
    """Bytes of quantised leaves: ``bits`` per entry, packed per leaf, and one scale per leaf."""
    return sum(math.ceil(v.numel() * bits / 8) + v.element_size() for v in entry.values())


@plugin(
    "0 < share <= 1",
    "2 <= bits <= 16",
    paper="Stich et al., Sparsified SGD with Memory, NeurIPS 2018; Alistarh et al., QSGD, NeurIPS 2017",
)
def compress(
    rule: Literal["topk", "quantise"] = "topk", share: float = 0.1, bits: int = 8, feedback: bool | None = None
) -> Callable[[Method], Method]:
    """Sends a smaller form of a client's update; ``bytes_up`` counts that form exactly.

    ``topk`` keeps in every leaf the ``ceil(share numel)`` entries of largest magnitude, with their positions; ``quantise`` sends
    every entry in ``bits`` bits, rounded at random without bias, with one scale per leaf. With feedback a client adds what it left
    out to its next update: ``e <- d + e - C(d + e)``. Trainable leaves only; buffers travel as they are.

    Args:
        rule: how.
        share: of the entries that ``topk`` keeps; 1 changes nothing.
        bits: per entry of ``quantise``, sign included.
        feedback: whether what is left out is kept; None for ``topk`` only.

    Example:
        >>> import fedloom as fl
        >>> print(fl.compose(fl.fedavg(), fl.compress("topk", share=0.01)))
        fedavg() + compress(rule='topk', share=0.01)
    """
    if rule not in ("topk", "quantise"):
        raise UserError(f"compress: rule={rule!r}; expected 'topk' or 'quantise'")
    if not isinstance(bits, int):
        raise UserError(f"compress: bits={bits!r}; expected a whole number")
    remember = rule == "topk" if feedback is None else feedback

    def fn(message: Message, memory: Leaves, seen: Seen) -> tuple[Message, Leaves]:
        delta = message.get("delta", {})
        full = tensors.add(delta, memory)
        key = rng.fold(seen.noise, _STREAM)
        sent = {
            name: largest(v, share) if rule == "topk" else quantised(v, bits, rng.fold(key, i))
            for i, (name, v) in enumerate(full.items())
        }
        left = {n: seen.gated(n, full[n] - sent[n]) if n in full else e for n, e in memory.items()}
        return ({**message, "delta": sent} if delta else message), left

    def size(entry: Leaves) -> int:
        return sparse_bytes(entry, share) if rule == "topk" else packed_bytes(entry, bits)

    def zeros(facts: Facts) -> Leaves:
        return tensors.zeros_like(facts.travelling(extra=None))

    stage = Stage(
        owner=OWNER, fn=fn, memory=zeros if remember else None, wire={"delta": size}, follows=("clip", "noise")
    )

    def apply(method: Method) -> Method:
        if rule == "topk" and share == 1:
            return method
        return method.claiming("the wire form of the entry 'delta'", OWNER).adding(stages=(stage,))

    return apply
