"""Convolution and pooling of a whole cohort, for layers that run under ``vmap`` on CUDA.

A convolution under ``vmap`` is a grouped one, of which cuDNN computes one client after another. Where a client's share is
small it is faster to lay the patches out as a matrix and to multiply all clients at once; where it is large, cuDNN stays.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from fedloom.frames import Frame
from fedloom.gpu.geometry import Geometry, Pair, sides, steps_of
from fedloom.numerics import tf32
from fedloom.ops.dispatch import INTERPRETED
from fedloom.ops.mapped import clients_at
from fedloom.torch_internals import is_batched

PATCH_BYTES = 32 << 20
"""Most bytes of one client's patches; measured on an H200, larger ones are faster with cuDNN."""
LARGE_FILTERS = 25
LARGE_PATCHES = 48 << 20
"""The same for filters of at least 5 x 5."""
FEW = 8
FEW_PATCHES = 80 << 20
"""The same for fewer clients than these, for which cuDNN takes slower ways, and for layers with more outputs than inputs, whose gradients it
computes slowly."""
KEPT_BYTES = 1 << 30
"""Most bytes of patches that one layer keeps for its backward pass; larger ones are laid out again."""
SMALL_FILTERS = 4096
"""Up to this size of a client's filters, products are made picture by picture, which spares two transpositions."""


@cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def present(x: Tensor) -> bool:
    """Whether there are kernels where a tensor is."""
    return (x.is_cuda or INTERPRETED) and _installed()


def serves(*tensors: Tensor | None, shared: Iterable[Tensor] = ()) -> bool:
    """Whether these tensors are a cohort's, on CUDA, one ``vmap`` deep, with kernels at hand; not while a step is traced.

    Args:
        tensors: what clients have.
        shared: what all clients may share; where they do not, it is a cohort's too.
    """
    inside = (t for t in shared if torch._C._functorch.is_functorch_wrapped_tensor(t))
    found = [t for t in (*tensors, *inside) if t is not None]
    if not present(found[0]) or not all(is_batched(t) for t in found):
        return False
    cores = [torch._C._functorch.get_unwrapped(t) for t in found]
    return not any(torch._C._functorch.is_functorch_wrapped_tensor(t) or isinstance(t, FakeTensor) for t in cores)


def clients(x: Tensor) -> int:
    """How many clients stand side by side, seen from inside ``vmap``."""
    return int(torch._C._functorch.get_unwrapped(x).shape[torch._C._functorch.maybe_get_bdim(x)])


def convolution(layer: nn.Conv2d, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor | None:
    """The convolution of one client inside ``vmap``, plain or depthwise; None where no kernel of ours serves."""
    steps = steps_of(layer)
    if steps is None or x.dim() != 4:
        return None
    from fedloom.gpu.depthwise import filtered

    return convolved(x, w, bias, *steps) if layer.groups == 1 else filtered(x, w, bias, *steps)


def convolved(x: Tensor, w: Tensor, bias: Tensor | None, stride: Pair, padding: Pair, dilation: Pair) -> Tensor | None:
    """The convolution of one client inside ``vmap``; None where no kernel of ours serves."""
    # For one client cuDNN is as fast, and has nothing to compile.
    if not x.numel() or not serves(x, w, bias) or clients(x) == 1:
        return None
    rows, columns = sides(x.shape[2:], w.shape[2:], (stride, padding, dilation))
    limit = LARGE_PATCHES if w.shape[2:].numel() >= LARGE_FILTERS else PATCH_BYTES
    widening = w.shape[0] > w.shape[1] and torch.is_grad_enabled()
    limit = FEW_PATCHES if clients(x) < FEW or widening else limit
    if w.shape[1:].numel() * x.shape[0] * rows * columns * x.element_size() > limit:
        return None
    y: Tensor = _Lifted.apply(_CohortConvolution, x, w, bias, stride, padding, dilation)  # type: ignore[no-untyped-call]
    return y


def serves_filters(x: Tensor, w: Tensor, bias: Tensor | None) -> bool:
    """Whether kernels serve a layer of several clients, who may share filters and bias, both in the type of the pictures."""
    given = [w] if bias is None else [w, bias]
    return all(t.dtype == x.dtype for t in given) and serves(x, shared=given) and clients(x) > 1


def batch_normalised(norm: nn.modules.batchnorm._BatchNorm, x: Tensor, frame: Frame) -> Tensor | None:
    """Batch normalisation of one client inside ``vmap``; None where no kernel serves."""
    if x.dim() < 3 or not serves_norm(norm, x, frame):
        return None
    y, mean, var, count = normalised(x, frame.mask, norm.weight, norm.bias, norm.eps)
    if norm.training and norm.running_mean is not None:
        norm._track(mean, var, count)  # type: ignore[operator]
    return y


def serves_norm(norm: nn.modules.batchnorm._BatchNorm, x: Tensor, frame: Frame) -> bool:
    """Whether a kernel serves a normalisation by batch, of which clients may share the weight."""
    return serves(x, frame.mask, shared=[t for t in (norm.weight, norm.bias) if t is not None])


def normalised(
    x: Tensor, mask: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Batch normalisation of one client inside ``vmap``: output, mean, variance and number of values per channel."""
    y, mean, var, count = _Lifted.apply(_CohortNormalisation, x, mask, weight, bias, eps)  # type: ignore[no-untyped-call]
    return y, mean, var, count


class _Lifted(torch.autograd.Function):
    """A cohort's function called for one client inside ``vmap``: the rule for ``vmap`` calls it once for all of them."""

    @staticmethod
    def forward(cohort: type[torch.autograd.Function], *args: Any) -> Any:
        raise AssertionError("the kernels serve cohorts only")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is kept: the rule below replaces the function before it is differentiated."""

    @staticmethod
    def vmap(info: Any, axes: Any, cohort: Any, *args: Any) -> tuple[Any, Any]:
        made = cohort.apply(*(clients_at(a, axis, info.batch_size) for a, axis in zip(args, axes[1:], strict=True)))
        return made, 0 if isinstance(made, Tensor) else (0,) * len(made)


class _CohortConvolution(torch.autograd.Function):
    """x: (clients, batch, channels, height, width); w: (clients, outputs, channels, kernel height, kernel width)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, stride: Pair, padding: Pair, dilation: Pair
    ) -> Tensor:
        from fedloom.gpu import patches

        clients, batch, outputs = *x.shape[:2], w.shape[1]
        small = w[0].numel() <= SMALL_FILTERS
        shape = Geometry.of(x, w, (stride, padding, dilation), bias=bias is not None, apart=small)
        x = x.contiguous()
        matrix = _filters(w, bias, shape.rows)
        columns = patches.gathered(x, shape)
        ctx.shape, ctx.size, ctx.tf32 = shape, x.shape, torch.backends.cudnn.allow_tf32
        kept = columns.numel() * columns.element_size() <= KEPT_BYTES
        ctx.save_for_backward(matrix, columns if kept else None, None if kept else x)
        y = x.new_empty(clients, batch, outputs, *shape.out)  # not a view: a layer behind may work in place
        with tf32(products=ctx.tf32):
            if small:
                each = matrix[:, None].expand(-1, batch, -1, -1).flatten(0, 1)
                torch.bmm(each, columns.flatten(0, 1), out=y.view(clients * batch, outputs, -1))
            else:
                made = torch.bmm(matrix, columns).view(clients, outputs, batch, *shape.out)
                y.copy_(made.transpose(1, 2))
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        from fedloom.gpu import patches

        matrix, columns, x = ctx.saved_tensors
        shape, size = ctx.shape, ctx.size
        clients, batch, outputs = dy.shape[:3]
        dx = dw = db = None
        if shape.apart:
            d = dy.reshape(clients * batch, outputs, -1)
        else:
            d = dy.transpose(1, 2).reshape(clients, outputs, -1)
        with tf32(products=ctx.tf32):
            if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
                columns = patches.gathered(x, shape) if columns is None else columns
                if shape.apart:
                    whole = torch.bmm(d, columns.flatten(0, 1).transpose(1, 2)).view(clients, batch, outputs, -1).sum(1)
                else:
                    whole = torch.bmm(d, columns.transpose(1, 2))
                dw = whole[..., : shape.inner].reshape(clients, outputs, size[2], *shape.kernel)
                db = whole[..., shape.inner] if shape.bias else None
            if ctx.needs_input_grad[0]:
                across = matrix.transpose(1, 2)
                if shape.apart:
                    across = across[:, None].expand(-1, batch, -1, -1).flatten(0, 1)
                dx = patches.scattered(torch.bmm(across, d), size, shape)
        return dx, dw, db, None, None, None


def _filters(w: Tensor, bias: Tensor | None, rows: int) -> Tensor:
    """Filters as a matrix, the bias behind them, zeros behind that."""
    parts = [w.flatten(2)] if bias is None else [w.flatten(2), bias[..., None]]
    used = sum(p.shape[2] for p in parts)
    if rows > used:
        parts.append(w.new_zeros(*w.shape[:2], rows - used))
    return torch.cat(parts, 2)


class _CohortNormalisation(torch.autograd.Function):
    """x: (clients, batch, channels, ...); mask: (clients, batch); weight and bias: (clients, channels)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, mask: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        from fedloom.gpu import norms

        flat = x.reshape(*x.shape[:3], -1).contiguous()
        mask = None if mask is None else mask.contiguous()
        weight, bias = (None if t is None else t.contiguous() for t in (weight, bias))
        mean, var, count = norms.moments(flat, mask)
        scale = torch.rsqrt(var + eps)
        y = x.new_empty(x.shape)
        norms.apply(flat, y, mean, scale, weight, bias)
        ctx.save_for_backward(flat, mask, weight, mean, scale, count.clamp(min=1))
        ctx.mark_non_differentiable(mean, var, count)
        return y, mean, var, count

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        from fedloom.gpu import norms

        flat, mask, weight, mean, scale, count = ctx.saved_tensors
        dx, sums = norms.back(flat, dy.reshape(flat.shape).contiguous(), mask, mean, scale, weight, count)
        return dx.view(dy.shape), None, *slopes(sums, weight), None


def laid(value: Tensor) -> Tensor:
    """A cohort's tensor of which every client's part lies without gaps; what all clients share is not copied."""
    return value if value[0].is_contiguous() else value.contiguous()


def slopes(sums: Tensor, weight: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of a normalisation's weight and bias from the sums over a channel, where it has them."""
    return (None, None) if weight is None else (sums[..., 1].to(weight.dtype), sums[..., 0].to(weight.dtype))
