"""Linear layers, squared lengths and inner products of a whole cohort, on CUDA under ``vmap``."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.kernels.cohort import _Lifted, clients, mapped, present, serves, shortened

DEEP, LARGE = 64, 1 << 21
"""Fewest summands, and fewest products of a cohort, for which float32 goes through :mod:`fedloom.kernels.threefold`; measured on an H200."""
FEW, MANY = 48, 1 << 13
"""With fewer rows of a client than these that is only faster where a cohort has less than so many columns."""
CROSSED = 1 << 26
"""Fewest products for which the gradient of the weights does, where both factors lie across what is summed over."""
ROWS, MOST = 2048, 1 << 22
"""From this number of rows on, the gradient of the inputs goes that way too, for which the weights are laid out anew; with fewer than these
CUDA's grid has room for their programs."""
SHORT = 1 << 16
"""Tensors of at most so many values are joined: a launch for each of them would take longer than what it does."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x W^T + b``; of one client inside ``vmap`` on CUDA by batched products of the cohort.

    Torch's own rule multiplies the other way round, so that the gradient of W lies transposed: an optimiser that walks over W
    and its gradient then reads one of them at a fraction of the memory's speed.
    """
    x, weight, bias = shortened(x, weight, bias)
    served = x.dim() >= 2 and x.numel() and (serves(weight, bias, shared=[x]) or _serves_shared(x, weight, bias))
    if not served:
        return F.linear(x, weight, bias)
    y: Tensor = _Lifted.apply(_CohortLinear, x, weight, bias)  # type: ignore[no-untyped-call]
    return y


def squared_length(x: Tensor) -> Tensor:
    """``sum x^2``; of one client inside ``vmap`` on CUDA with a gradient of one pass instead of three."""
    # Outside of steps, which are captured, the call of a function of our own costs the host more than it spares the device.
    if not x.numel() or not x.dim() or not torch.is_grad_enabled() or not serves(x):
        return (x**2).sum()
    value: Tensor = _Lifted.apply(_CohortSquares, x)  # type: ignore[no-untyped-call]
    return value


def inner_products(x: Sequence[Tensor], plus: Sequence[Tensor], minus: Sequence[Tensor]) -> Tensor | None:
    """``sum_l <plus_l - minus_l, x_l>`` of one client inside ``vmap``, its gradient one pass; None where no kernel serves."""
    if not _pulling(x, plus, minus):
        return None
    value: Tensor = _Lifted.apply(_CohortPull, x[0].dtype, len(x), *x, *plus, *minus)  # type: ignore[no-untyped-call]
    return value


def half_squares(x: Sequence[Tensor], anchor: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor | None:
    """``1/2 sum_l ||x_l - anchor_l||^2`` of one client inside ``vmap``, computed in a type; None where no kernel serves."""
    if not _pulling(x, anchor):
        return None
    value: Tensor = _Lifted.apply(_CohortPull, dtype or x[0].dtype, len(x), *x, *anchor)  # type: ignore[no-untyped-call]
    return value


def half_squares_of_all(x: Sequence[Tensor], anchor: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The same of every client, outside of ``vmap`` and without a gradient: tensors of x have a client axis, anchors have none.

    Example:
        >>> half_squares_of_all([torch.tensor([[1.0, 2.0], [3.0, 4.0]])], [torch.tensor([1.0, 1.0])], torch.float64)
        tensor([0.5000, 6.5000], dtype=torch.float64)
    """
    if present(x[0]) and all(t.dtype == x[0].dtype and t.numel() for t in (*x, *anchor)):
        wide = [a.expand(len(v), *a.shape) for v, a in zip(x, anchor, strict=True)]
        value: Tensor = _CohortPull.apply(dtype, len(x), *x, *wide)  # type: ignore[no-untyped-call]
        return value
    gaps = [v.to(dtype) - a.to(dtype) for v, a in zip(x, anchor, strict=True)]
    return 0.5 * torch.stack([(gap**2).reshape(len(gap), -1).sum(1) for gap in gaps], 1).sum(1)


class Pull(NamedTuple):
    """What is still to be added to the gradient of a leaf: ``(a - b) dy`` of each client, computed in a type."""

    leaf: Tensor
    a: Tensor
    b: Tensor
    dy: Tensor
    dtype: torch.dtype

    def onto(self, gradient: Tensor | None) -> Tensor:
        """It and the rest of the gradient: one pass, where autograd would write both down before it adds them up."""
        from fedloom.kernels import pulls

        flat = None if gradient is None else gradient.reshape(self.a.shape).contiguous()
        return pulls.pulled_back(self.a, self.b, self.dy, self.dtype, self.leaf.dtype, flat).view(self.leaf.shape)


class _Waiting(threading.local):
    """Where functions of this thread put their pulls off to; None for nowhere."""

    pulls: list[Pull] | None = None


_waiting = _Waiting()


@contextmanager
def put_off() -> Iterator[list[Pull]]:
    """Of :func:`inner_products` and :func:`half_squares` that are made inside, what they add to the gradient of large leaves is put off.

    The gradient is taken inside too, in whichever thread, and :func:`completed`.
    """
    before, _waiting.pulls = _waiting.pulls, list[Pull]()
    try:
        yield _waiting.pulls
    finally:
        _waiting.pulls = before


def completed(
    gradients: Sequence[Tensor | None], leaves: Sequence[Tensor], pulls: Sequence[Pull]
) -> list[Tensor | None]:
    """The gradients of leaves with what was put off."""
    found, places = list(gradients), {id(leaf): i for i, leaf in enumerate(leaves)}
    for pull in pulls:
        if id(pull.leaf) in places:
            place = places[id(pull.leaf)]
            found[place] = pull.onto(found[place])
    return found


def _pulling(x: Sequence[Tensor], *others: Sequence[Tensor]) -> bool:
    """Whether x belongs to a cohort, and others, which all clients may share, are alike and have no gradient."""
    fixed = [t for own in others for t in own]
    if not x or not x[0].is_floating_point() or not serves(*x, shared=fixed):
        return False
    alike = all(t.dtype == x[0].dtype and t.device == x[0].device and t.numel() for t in (*x, *fixed))
    shaped = all([t.shape for t in own] == [t.shape for t in x] for own in others)
    moving = any((torch._C._functorch.get_unwrapped(t) if mapped(t) else t).requires_grad for t in fixed)
    return alike and shaped and not moving


def multiplied(a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor, least: int = 0, *, onto: bool = False) -> Tensor:
    """``a b^T + bias`` of every client, or without a bias that added to what is there.

    Args:
        a: (clients, rows, depth).
        b: (clients, columns, depth).
        bias: (clients, columns), or None.
        out: (clients, rows, columns), each row without gaps, which is overwritten and returned.
        least: products of float32 are made as three of TF32 where there are so many, and where that is faster.
        onto: whether ``out`` is added to.
    """
    if out.numel() * a.shape[2] >= least and _threefold(a, b, out):
        from fedloom.kernels import threefold

        return threefold.product(a, b, None if bias is None else bias.contiguous(), out, onto=onto)
    if onto:
        return out.baddbmm_(a, b.mT)
    return torch.bmm(a, b.mT, out=out) if bias is None else torch.baddbmm(bias[:, None], a, b.mT, out=out)


def turned(d: Tensor, weight: Tensor) -> Tensor:
    """The ``b`` of ``d weight``; laid out anew where the product of float32 is faster that way."""
    across = weight.mT
    return across.contiguous() if _threefold(d, across) else across


def crossed(d: Tensor, x: Tensor) -> Tensor:
    """``d^T x`` of every client, what a layer's weights are told: (clients, rows, outputs), (clients, rows, inputs)."""
    return multiplied(d.mT, x.mT, None, d.new_empty(len(d), d.shape[2], x.shape[2]), CROSSED)


def _serves_shared(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether all clients share a layer that has no gradient and is faster as below; torch multiplies all of their rows at once, too."""
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    fixed = not torch.is_grad_enabled() and not any(wrapped(t) for t in (weight, bias) if t is not None)
    return fixed and serves(x) and _pays(x, 1, clients(x) * x.shape[:-1].numel(), weight.shape[0])


def _pays(x: Tensor, several: int, rows: int, columns: int) -> bool:
    """Whether several products of float32, over the last axis of x, are faster as three of TF32, where that one alone is not allowed."""
    if x.dtype != torch.float32 or torch.backends.cuda.matmul.allow_tf32 or not present(x) or not _has_tf32(x.device):
        return False
    depth = x.shape[-1]
    few = rows < FEW and several * columns >= MANY
    return depth >= DEEP and several * rows * columns * depth >= LARGE and rows < MOST and not few


def _threefold(a: Tensor, b: Tensor, *others: Tensor) -> bool:
    """The same of factors as they lie; addresses within a client's part of these tensors have 32 bits."""
    far = max([sum((n - 1) * s for n, s in zip(t.shape[1:], t.stride()[1:], strict=True)) for t in (a, b, *others)])
    return far < 1 << 31 and _pays(a, a.shape[0], a.shape[1], b.shape[1])


@cache
def _has_tf32(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] >= 8


class _CohortLinear(torch.autograd.Function):
    """x: (clients, rows..., inputs); weight: (clients, outputs, inputs); bias: (clients, outputs); without a gradient all may share these."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not any(ctx.needs_input_grad) and not any(t.stride(0) for t in (weight, bias) if t is not None):
            weight, bias = weight[:1], None if bias is None else bias[:1]
        flat = x.reshape(len(weight), -1, x.shape[-1])
        y = x.new_empty(*x.shape[:-1], weight.shape[1])  # not a view: a layer behind may work in place
        multiplied(flat, weight, bias, y.view(*flat.shape[:2], -1))
        ctx.save_for_backward(flat, weight)
        ctx.size = x.shape
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        flat, weight = ctx.saved_tensors
        d = dy.reshape(*flat.shape[:2], weight.shape[1]).contiguous()
        dx = dw = None
        again = torch.is_grad_enabled()  # a gradient that is to have one itself is torch's
        if ctx.needs_input_grad[0]:
            if flat.shape[1] >= ROWS and not again:
                dx = multiplied(d, turned(d, weight), None, d.new_empty(flat.shape))
            else:
                dx = torch.bmm(d, weight)
            dx = dx.view(ctx.size)
        if ctx.needs_input_grad[1]:
            dw = torch.bmm(d.mT, flat) if again else crossed(d, flat)
        return dx, dw, d.sum(1) if ctx.needs_input_grad[2] else None


class _CohortSquares(torch.autograd.Function):
    """x: (clients, ...)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        length: Tensor = torch.linalg.vector_norm(x.flatten(1), dim=1)
        return length**2

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        x: Tensor = ctx.saved_tensors[0]
        return x * (2 * dy).view(-1, *[1] * (x.dim() - 1))


class _CohortPull(torch.autograd.Function):
    """``sum <a - b, x>`` of lists x, a, b of tensors (clients, ...), or ``1/2 sum ||x - b||^2`` of lists x, b."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, count: int, *tensors: Tensor) -> Tensor:
        from fedloom.kernels import pulls

        ctx.shapes, ctx.kind, ctx.given = [t.shape for t in tensors[:count]], tensors[0].dtype, len(tensors)
        ctx.wide = torch.promote_types(dtype, torch.float32)
        sizes = [shape[1:].numel() for shape in ctx.shapes]
        short = [i for i, size in enumerate(sizes) if size <= SHORT]
        ctx.groups = [*([short] if short else []), *([i] for i, size in enumerate(sizes) if size > SHORT)]
        given = [tensors[at : at + count] for at in range(0, len(tensors), count)]
        lists = [[_joined([own[i] for i in group]) for group in ctx.groups] for own in given]
        a, b = lists[-2:]
        ctx.save_for_backward(*a, *b)
        ctx.waiting = _waiting.pulls
        ctx.leaves = {i: tensors[i] for (i, *more) in ctx.groups if not more and tensors[i].is_leaf}
        return pulls.pulled(a, b, lists[0] if len(lists) == 3 else None, ctx.wide).to(dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        from fedloom.kernels import pulls

        made: list[Tensor | None] = [None] * ctx.given
        a, b = ctx.saved_tensors[: len(ctx.groups)], ctx.saved_tensors[len(ctx.groups) :]
        for group, plus, minus in zip(ctx.groups, a, b, strict=True):
            if ctx.waiting is not None and group[0] in ctx.leaves:
                ctx.waiting.append(Pull(ctx.leaves[group[0]], plus, minus, dy, ctx.wide))
                continue
            slope = pulls.pulled_back(plus, minus, dy, ctx.wide, ctx.kind)
            widths = [ctx.shapes[i][1:].numel() for i in group]
            for i, part in zip(group, slope.split(widths, 1), strict=True):
                made[i] = part.view(ctx.shapes[i])
        return None, None, *made


def _joined(values: Sequence[Tensor]) -> Tensor:
    """Tensors (clients, ...) as one matrix (clients, values); what all clients share is laid out once, and expanded."""
    clients = len(values[0])
    if any(v.stride(0) for v in values):
        flat = [v.reshape(clients, -1).contiguous() for v in values]
        return flat[0] if len(flat) == 1 else torch.cat(flat, 1)
    flat = [v[0].reshape(-1).contiguous() for v in values]
    return (flat[0] if len(flat) == 1 else torch.cat(flat)).expand(clients, -1)
