"""Where intermediate supervision may be attached: candidates in any network, and a choice among them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import torch

from fedloom.errors import UserError
from fedloom.spec.structure import Call, Structure

Position = Literal["input", "middle", "output"]

POINTS, SPACING = 3, 2
"""Defaults: they shrink where a network is too small for them."""

_FUSIONS = ("attention", "attn", "concat", "fusion", "fuse", "inject", "merge")
_PLAIN = ("Dropout", "Identity", "Flatten", "Unflatten")
_CHANNELS_LAST = ("Linear", "LayerNorm", "Embedding", "Attention")


@dataclass(frozen=True, slots=True)
class Tap:
    """A place where features are read: the output of a module.

    Args:
        name: the module.
        kind: why it is a candidate: ``model`` (its own list), ``scale``, ``block``, ``bottleneck``, ``fusion``, ``layer``, ``given``.
        shape: of the output for the sample; axis 0 is the row.
        axis: of the channels.
    """

    name: str
    kind: str
    shape: torch.Size
    axis: int

    @property
    def channels(self) -> int:
        """Number of channels."""
        return self.shape[self.axis]

    @property
    def positions(self) -> int:
        """Number of latent positions: pixels of a map, tokens, 1 for a vector."""
        return math.prod(self.shape[1:]) // self.channels


class ForwardTrace:
    """The calls of a forward pass up to the head, with what the rules below ask of them."""

    def __init__(self, structure: Structure) -> None:
        calls = structure.calls
        stop = next((i for i, c in enumerate(calls) if c.name == structure.head), len(calls))
        rows = calls[min(stop, len(calls) - 1)].shape[:1] if calls else torch.Size()
        self.calls = [c for c in calls[:stop] if c.shape[:1] == rows and len(c.shape) > 1]
        self.once = {name for name, times in Counter(c.name for c in calls).items() if times == 1}
        self.parents = {p for c in calls for p in _ancestors(c.name)}
        self.axes = _axes(self.calls)
        self.depth = list(accumulate(self.is_layer(c) for c in self.calls))

    def is_layer(self, call: Call) -> bool:
        """Whether a module has weights of its own and is no normalisation."""
        return call.weighted and "Norm" not in call.kind

    def channels(self, at: int) -> int:
        """Number of channels of the output at a position of ``calls``."""
        return self.calls[at].shape[self.axes[at]]

    def size(self, at: int) -> int:
        """Number of latent positions of the output at a position of ``calls``."""
        return math.prod(self.calls[at].shape[1:]) // max(self.channels(at), 1)

    def settled(self, at: int) -> int:
        """The last of the normalisations and activations that directly follow the call at a position of ``calls``."""
        best = at
        for j in range(at + 1, len(self.calls)):
            call = self.calls[j]
            if call.shape != self.calls[at].shape or self.is_layer(call) or call.name in self.parents:
                break
            if call.name in self.once and not any(word in call.kind for word in _PLAIN):
                best = j
        return best

    def tap(self, at: int, kind: str) -> Tap:
        """The tap at a position of ``calls``."""
        return Tap(self.calls[at].name, kind, self.calls[at].shape, self.axes[at])


def _axes(calls: Sequence[Call]) -> list[int]:
    """Channels are axis 1, but the last axis behind layers that work on the last axis (tokens)."""
    found, last = [], {3: -1}
    for call in calls:
        dims = len(call.shape)
        if call.weighted:
            last[dims] = -1 if any(word in call.kind for word in _CHANNELS_LAST) else 1
        found.append(1 if dims == 2 else last.get(dims, 1) % dims)
    return found


def _ancestors(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]


def candidates(structure: Structure, points: int = POINTS) -> tuple[Tap, ...]:
    """Places where a network can be tapped, in forward order.

    The model's own ``tap_points`` if it has them; else the outputs of four kinds, found in the calls of one forward pass:
    ``scale`` (the last module before the number of positions changes), ``block`` (a module that holds several weight layers),
    ``bottleneck`` (fewer channels than before at the same number of positions), ``fusion`` (attention, concatenation,
    injection, by type); if these are fewer than ``points``, the output of every weight layer but the head, after its
    activation.

    Args:
        structure: of the model.
        points: how many taps are wanted.

    Reference: OmniISR, section 3.1.1.
    """
    trace = ForwardTrace(structure)
    if structure.tap_points:
        found = [named(structure, name, "model") for name in structure.tap_points]
    else:
        kinds, layers = _kinds(trace), layer_outputs(trace)
        found = kinds if len(kinds) >= points or len(kinds) >= len(layers) else layers
    if structure.task == "segmentation":
        found = [t for t in found if len(t.shape) == 4]
    if not found:
        raise UserError(
            "isr: the model has no layer before its head whose output could be tapped; "
            "use a deeper model, or give it a list tap_points of module names"
        )
    return tuple(found)


def named(structure: Structure, name: str, kind: str) -> Tap:
    """The tap at a module of a name."""
    at = max((i for i, c in enumerate(structure.calls) if c.name == name), default=None)
    if at is None:
        known = ", ".join(dict.fromkeys(c.name for c in structure.calls[:12]))
        raise UserError(f"isr: the forward pass calls no module {name!r} to tap; it calls {known} ...")
    return Tap(name, kind, structure.calls[at].shape, _axes(structure.calls[: at + 1])[-1])


def choose(structure: Structure, points: int | None, spacing: int | None, position: Position) -> tuple[Tap, ...]:
    """``points`` candidates, ``spacing`` apart, at the input side, the middle or the output side.

    Defaults (None) shrink to fit, the spacing first, then the points; given values that do not fit are an error.

    Example:
        >>> from fedloom.network.inspect_model import build
        >>> from fedloom.engines.choose_device import choose_device
        >>> from fedloom.models import deeplabv3plus_resnet18
        >>> cpu, x = choose_device("cpu", "fp32"), torch.zeros(2, 3, 32, 32)
        >>> net = build(deeplabv3plus_resnet18(11), x, task="segmentation", device=cpu)
        >>> [t.name for t in choose(net.structure, None, None, "input")]
        ['stem', 'layer2', 'layer4']
    """
    found = candidates(structure, POINTS if points is None else points)
    wanted, step = POINTS if points is None else points, SPACING if spacing is None else spacing
    listing = f"the model has {len(found)}: {', '.join(t.name for t in found)}"
    while (wanted - 1) * step + 1 > len(found):
        if spacing is None and step > 1:
            step -= 1
        elif points is None and spacing is None:
            wanted = len(found)
        elif points is None:
            raise UserError(
                f"isr: spacing={spacing} leaves no room for {wanted} points ({listing}); give fewer points or less spacing"
            )
        else:
            asked = f"points={points}" + ("" if spacing is None else f" with spacing={spacing}")
            raise UserError(f"isr: {asked} needs {(wanted - 1) * step + 1} candidates, but {listing}")
    span = (wanted - 1) * step + 1
    begin = {"input": 0, "middle": (len(found) - span) // 2, "output": len(found) - span}[position]
    return found[begin : begin + span : step]


def leaves_before(structure: Structure, tap: str) -> frozenset[str]:
    """Trainable leaves of the user's model that come into play before the output of a module."""
    end = max(i for i, c in enumerate(structure.calls) if c.name == tap)
    begun: dict[str, int] = {}
    for i, call in enumerate(structure.calls):
        for module in (call.name, *_ancestors(call.name)):
            begun.setdefault(module, i)
    return frozenset(
        leaf.name
        for leaf in structure.leaves
        if leaf.trainable and not leaf.owner and begun.get(leaf.module, -1 if not leaf.module else end + 1) <= end
    )


def _kinds(trace: ForwardTrace) -> list[Tap]:
    found: dict[int, str] = {}
    for at, call in enumerate(trace.calls):
        alone = call.name in trace.once
        if call.name in trace.parents:
            held = {c.name for c in trace.calls if c.name.startswith(call.name + ".") and trace.is_layer(c)}
            if len(held) > 1 and alone:
                found[at] = "block"
        if any(word in call.kind.lower() for word in _FUSIONS) and alone:
            found.setdefault(at, "fusion")
        if at and trace.size(at) != trace.size(at - 1):
            same = (j for j in range(at - 1, -1, -1) if trace.size(j) == trace.size(at - 1))
            where = next((j for j in same if trace.calls[j].name in trace.once), None)
            if where is not None:
                found.setdefault(where, "scale")
        elif at and trace.is_layer(call) and trace.channels(at) < trace.channels(at - 1):
            end = trace.settled(at)
            if trace.calls[end].name in trace.once:
                found.setdefault(end, "bottleneck")
    return _apart(trace, found)


def layer_outputs(trace: ForwardTrace) -> list[Tap]:
    """The output of every weight layer but the head, after its activation."""
    found = {}
    for at, call in enumerate(trace.calls):
        if trace.is_layer(call) and call.name not in trace.parents:
            end = trace.settled(at)
            if trace.calls[end].name in trace.once:
                found[end] = "layer"
    return _apart(trace, found)


def _apart(trace: ForwardTrace, found: dict[int, str]) -> list[Tap]:
    """Of candidates without a weight layer between them, the last; none before the first weight layer."""
    kept = {trace.depth[at]: at for at in sorted(found)}
    return [trace.tap(at, found[at]) for depth, at in sorted(kept.items()) if depth]
