"""Attention of a wave: one call of torch's function, with the clients in the batch or in the heads.

``scaled_dot_product_attention`` has no parameters, so that one call can serve all clients. torch's
rule for ``vmap`` decomposes it, and selects a kernel without knowing if a gradient is needed: on
CUDA the backward pass then fails, on a CPU clients run one after another. The rule here replaces
torch's, for every model that calls the function, also inside ``nn.MultiheadAttention``. Outside of
:func:`whole` it calls torch's rule.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends import mha

from fedloom.ops.mapped import clients_at
from fedloom.torch_internals import add_batch_axis, innermost_vmap, is_batched, without_vmap_rule

OPERATOR = "scaled_dot_product_attention"
MOST = (1 << 16) - 1
"""Most sequences of one call: the size of the grid's axis on which kernels count them."""


@contextmanager
def whole() -> Iterator[None]:
    """Make ``vmap`` call attention once for all clients, and switch off kernels without a rule."""
    _registered()
    with _slow:
        yield


class _SlowPath:
    """Switches off torch's fused encoders while any thread is inside: they have no rule."""

    def __init__(self) -> None:
        self.lock, self.inside, self.before = threading.Lock(), 0, True

    def __enter__(self) -> None:
        with self.lock:
            if not self.inside:
                self.before = mha.get_fastpath_enabled()
                mha.set_fastpath_enabled(False)
            self.inside += 1

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.inside -= 1
            if not self.inside:
                mha.set_fastpath_enabled(self.before)


_slow = _SlowPath()
_attend: Any = F.scaled_dot_product_attention


@cache
def _registered() -> torch.library.Library:
    """Register the rule, once per process. It is valid as long as the returned library exists."""
    library = torch.library.Library("aten", "IMPL")
    torch.library.register_vmap(f"aten::{OPERATOR}", _rule, lib=library)
    with warnings.catch_warnings():
        # torch warns that its own rule is replaced.
        warnings.simplefilter("ignore")
        library.impl(OPERATOR, _entered, "FuncTorchVmapMode")
    return library


def _entered(query: Tensor, *args: Any, **named: Any) -> Any:
    """Call the rule; outside of :func:`whole`, or with noise that clients share, torch's own."""
    operator: Any = torch.ops.aten.scaled_dot_product_attention.default
    if not _slow.inside:
        return operator.decompose(query, *args, **named)
    noise = named.get("dropout_p", args[3] if len(args) > 3 else 0.0)
    if noise:
        level = innermost_vmap()
        if level.randomness() != "different":
            return operator.decompose(query, *args, **named)
        if not any(isinstance(t, Tensor) and is_batched(t) for t in (query, *args, *named.values())):
            each = query.expand(level.batch_size(), *query.shape)  # clients differ in the noise only
            query = add_batch_axis(each, level.level())
    with without_vmap_rule():
        return operator(query, *args, **named)


def _rule(
    info: Any,
    axes: Sequence[int | None],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Tensor, int]:
    """Compute attention of all clients. ``axes``: each tensor's client axis, or None."""
    clients = info.batch_size
    inputs = [clients_at(t, axis, clients) for t, axis in zip((query, key, value), axes, strict=False)]
    if min(t.dim() for t in inputs) < 3:
        raise RuntimeError(
            f"attention needs sequences of vectors, not {', '.join(str(list(t.shape[1:])) for t in inputs)}"
        )
    flat = all(t.dim() == 3 for t in inputs)
    rank = max(4, *(t.dim() for t in inputs))
    parts = [_of_rank(t, rank) for t in inputs]
    rows = torch.broadcast_shapes(*(p.shape[1:-3] for p in parts))
    parts = [p.expand(clients, *rows, *p.shape[-3:]) for p in parts]
    mask = None
    if attn_mask is not None:
        mask = _of_rank(clients_at(attn_mask, axes[3], 1 if axes[3] is None else clients), rank)
    options: dict[str, Any] = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    if not rows:
        output = _attend(*parts, mask, **options)
        return (output[:, 0] if flat else output), 0
    if len(rows) == 1 and rows[0] and mask is None and not enable_gqa and _joins(parts, 1) and not _joins(parts, 0):
        output = _attend(*(p.flatten(1, 2) for p in parts), None, **options)
        return output.unflatten(1, (*rows, -1)), 0
    if mask is not None:
        several = any(n > 1 for n in mask.shape[: len(rows) + 1])
        mask = (mask.expand(clients, *rows, *mask.shape[-3:]) if several else mask).flatten(0, len(rows))
    output = _in_pieces([p.flatten(0, len(rows)) for p in parts], mask, options)
    return output.unflatten(0, (clients, *rows)), 0


def _of_rank(value: Tensor, rank: int) -> Tensor:
    """Raise the rank of a tensor by new axes after the client axis."""
    return value[(slice(None), *[None] * (rank - value.dim()))]


def _joins(parts: Sequence[Tensor], axis: int) -> bool:
    """Return whether an axis and the next can be flattened without a copy."""
    pairs = [(p.shape[axis : axis + 2], p.stride()[axis : axis + 2]) for p in parts]
    return all(1 in size or step[0] == size[1] * step[1] for size, step in pairs)


def _in_pieces(parts: Sequence[Tensor], mask: Tensor | None, options: dict[str, Any]) -> Tensor:
    """Compute attention of at most ``MOST`` sequences at a time."""
    count = len(parts[0])
    outputs = []
    for start in range(0, max(count, 1), MOST):
        some = [p[start : start + MOST] for p in parts] if count > MOST else parts
        own = mask[start : start + MOST] if mask is not None and len(mask) > MOST else mask
        outputs.append(_attend(*some, own, **options))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
