"""Bytes that are sent in a round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from fedloom import tree
from fedloom.bound import Bound
from fedloom.server import Dispatch
from fedloom.types import LeafSpec, Leaves
from fedloom.work import Reply


def traffic(
    bound: Bound, replies: Sequence[Reply], sent: Dispatch, asked: Sequence[str], newcomers: int = 0
) -> dict[str, Any]:
    """Bytes of a round, both ways and by kind: tensors really sent, broadcast counted once per client."""
    down: Counter[str] = Counter()
    for new, clients in ((False, len(asked) - newcomers), (True, newcomers)):
        if clients:
            down.update({k: v * clients for k, v in bytes_down(bound, sent, newcomer=new).items()})
    for name in asked:
        for owner, values in sent.addressed[name].items():
            down[owner] += tree.size_in_bytes(values)
    wire = {entry: size for stage in bound.method.upload for entry, size in stage.wire.items()}
    up: Counter[str] = Counter()
    for reply in replies:
        for entry, value in reply.message.items():
            parts = by_kind(entry, value)
            if entry in wire:
                parts = {next(iter(parts), entry): value}
            for kind, part in parts.items():
                up[kind] += wire.get(entry, tree.size_in_bytes)(part)
    totals = {"bytes_up": up.total(), "bytes_down": down.total()}
    return {**totals, "bytes_up_by_kind": dict(up), "bytes_down_by_kind": dict(down)}


def bytes_down(bound: Bound, sent: Dispatch, *, newcomer: bool = False) -> dict[str, int]:
    """Tensor bytes sent to one client, by kind; addressed messages left out, and leaves that are personal now.

    A newcomer (first participation, after round one) has no value of its own yet and is sent those too.
    """
    post = sent.post
    found: dict[str, int] = {}
    held = set() if newcomer else set(sent.personal)
    for name, spec in bound.specs.items():
        if _travels_down(spec) and name not in held:
            kind = "buffers" if spec.buffer else "parameters"
            found[kind] = found.get(kind, 0) + post.leaves[name].nbytes
    for owner, values in post.broadcast.items():
        for kind, part in by_kind(owner, values).items():
            found[kind] = found.get(kind, 0) + tree.size_in_bytes(part)
    return found


def by_kind(entry: str, value: Leaves) -> dict[str, Leaves]:
    """An entry of a message by kind: parameters, buffers, counts, and by its name what is none of these."""
    kind = {"delta": "parameters", "buffers": "buffers", "counters": "buffers"}.get(entry)
    if kind is not None:
        return {kind: value}
    if "count" not in value and "known" not in value:
        return {entry: value} if value else {}
    counts = {k: v for k, v in value.items() if k in ("count", "known")}
    rest = {k: v for k, v in value.items() if k not in counts}
    return {k: v for k, v in ((entry, rest), ("counts", counts)) if v}


def _travels_down(spec: LeafSpec) -> bool:
    return spec.copy == "main" and spec.kind in ("shared", "mirrored")
