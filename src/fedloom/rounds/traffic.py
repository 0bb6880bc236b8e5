"""Count the bytes of a round's messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from fedloom import tensors
from fedloom.clients.messages import Reply
from fedloom.network.bound_method import Bound
from fedloom.rounds.server import Dispatch
from fedloom.spec.leaves import LeafSpec
from fedloom.tensors import Leaves


def traffic(
    bound: Bound, replies: Sequence[Reply], sent: Dispatch, clients: Sequence[str], newcomers: int = 0
) -> dict[str, Any]:
    """Count the tensor bytes of a round, up and down, in total and by kind. A broadcast counts once per client.

    Args:
        bound: the method.
        replies: the replies with a message.
        sent: the server's messages.
        clients: the clients that the server sent messages to.
        newcomers: how many of them take part for the first time, after round one.
    """
    down: Counter[str] = Counter()
    for newcomer, count in ((False, len(clients) - newcomers), (True, newcomers)):
        if count:
            sizes = bytes_down(bound, sent, newcomer=newcomer)
            down.update({kind: size * count for kind, size in sizes.items()})
    for name in clients:
        for owner, values in sent.addressed[name].items():
            down[owner] += tensors.size_in_bytes(values)
    wire = {entry: size for stage in bound.method.upload for entry, size in stage.wire.items()}
    up: Counter[str] = Counter()
    for reply in replies:
        for entry, value in reply.message.items():
            parts = by_kind(entry, value)
            if entry in wire:
                parts = {next(iter(parts), entry): value}
            for kind, part in parts.items():
                up[kind] += wire.get(entry, tensors.size_in_bytes)(part)
    totals = {"bytes_up": up.total(), "bytes_down": down.total()}
    return {**totals, "bytes_up_by_kind": dict(up), "bytes_down_by_kind": dict(down)}


def bytes_down(bound: Bound, sent: Dispatch, *, newcomer: bool = False) -> dict[str, int]:
    """Count the tensor bytes sent to each client, by kind, without addressed messages.

    Leaves that are personal in this round are sent to newcomers only, which have no own values yet.
    """
    post = sent.post
    sizes: Counter[str] = Counter()
    not_sent = (not newcomer and post.off) or ()
    for name, spec in bound.specs.items():
        if _travels_down(spec) and name not in not_sent:
            sizes["buffers" if spec.buffer else "parameters"] += post.leaves[name].nbytes
    for owner, values in post.broadcast.items():
        for kind, part in by_kind(owner, values).items():
            sizes[kind] += tensors.size_in_bytes(part)
    return sizes


def by_kind(entry: str, value: Leaves) -> dict[str, Leaves]:
    """Split an entry of a message by kind: parameters, buffers, counts, or else the name of the entry."""
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
