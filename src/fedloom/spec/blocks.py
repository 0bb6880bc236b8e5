"""The blocks of a network, as FedAIMS supervises them."""

from __future__ import annotations

from fedloom.errors import UserError
from fedloom.spec.structure import Structure
from fedloom.spec.taps import ForwardTrace, Tap, layer_outputs, named


def blocks(structure: Structure) -> tuple[Tap, ...]:
    """The intermediate blocks 1 .. m-1 of a network; block m ends at the head and its feature is the head's input.

    The model's own ``blocks`` if it has them; else the segments that end at each change of spatial size (a pooling layer
    belongs to the segment before it, a strided convolution to the one behind it); else the weight layers.

    Reference: FedAIMS, section 3; the published storage gives m = 3, 4 and 4 for its networks.
    """
    if structure.head is None:
        raise UserError("aims: the model's head was not found; name it with head='...'")
    if structure.blocks:
        return tuple(named(structure, name, "model") for name in structure.blocks[:-1])
    trace = ForwardTrace(structure)
    ends = _segments(trace)
    if ends is None:
        return tuple(layer_outputs(trace)[:-1])
    return tuple(trace.tap(at, "segment") for at in ends)


def _segments(trace: ForwardTrace) -> list[int] | None:
    """Ends of the segments but the last; None for networks without maps."""
    if not any(len(c.shape) > 2 and trace.size(at) > 1 for at, c in enumerate(trace.calls)):
        return None
    ends: list[int] = []
    for at in range(1, len(trace.calls)):
        call = trace.calls[at]
        if trace.size(at) == trace.size(at - 1) or call.name in trace.parents:
            continue
        end = trace.settled(at) if "Pool" in call.kind else at - 1
        while end >= 0 and trace.calls[end].name not in trace.once:
            end -= 1
        fresh = trace.depth[end] > (trace.depth[ends[-1]] if ends else 0)
        if end >= 0 and fresh and trace.depth[end] < trace.depth[-1]:
            ends.append(end)
    return ends
