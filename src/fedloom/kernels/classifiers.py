"""The loss of a linear classifier on a cohort's features, on CUDA under ``vmap``: one kernel each way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedloom.kernels.cohort import _Lifted, clients, serves
from fedloom.kernels.crossentropies import UNUSED
from fedloom.kernels.rows import _laid

CLASSES, ROWS = 64, 1024
"""Most classes and rows of a client."""
PRODUCTS = 1 << 26
"""Most products (rows times channels times classes) of a cohort: of larger ones torch's kernels are the faster."""


def classified(
    u: Tensor,
    weight: Tensor,
    bias: Tensor,
    y: Tensor,
    mask: Tensor | None = None,
    extra: Tensor | None = None,
    scale: float = 1.0,
    share: float = 1.0,
) -> Tensor | None:
    """``a mean_i CE(u_i W^T + b, y_i) + l mean_i e_i`` of one client inside ``vmap``; None where no kernel serves.

    The means are ``sum m v / max(1, sum m)``. A row of label -100 has a cross-entropy of 0, and counts.

    Args:
        u: rows x channels.
        weight: W, classes x channels.
        bias: b.
        y: the rows' classes.
        mask: m, 1 for real rows and 0 for padding; None where all are real.
        extra: e, another value per row, or None.
        scale: a.
        share: l.
    """
    given = [t for t in (u, y, mask, extra) if t is not None]
    if not _fits(u, weight, bias, y, mask, extra) or not serves(weight, bias, shared=given):
        return None
    if clients(weight) * u.numel() * weight.shape[0] > PRODUCTS:
        return None
    value: Tensor = _Lifted.apply(  # type: ignore[no-untyped-call]
        _CohortClassifier, u, weight, bias, y, mask, extra, float(scale), float(share)
    )
    return value


def _fits(u: Tensor, weight: Tensor, bias: Tensor, y: Tensor, mask: Tensor | None, extra: Tensor | None) -> bool:
    """Whether these are a linear classifier's tensors, in a type and of a size that the kernels take."""
    if u.dim() != 2 or weight.dim() != 2 or not u.numel() or not weight.numel():
        return False
    per_row = all(t is None or t.shape == u.shape[:1] for t in (y, mask, extra))
    shaped = per_row and weight.shape[1] == u.shape[1] and bias.shape == weight.shape[:1]
    typed = u.dtype in (torch.float32, torch.float64) and u.dtype == weight.dtype == bias.dtype
    typed = typed and not y.is_floating_point() and (extra is None or extra.is_floating_point())
    small = weight.shape[0] <= CLASSES and u.shape[0] <= ROWS
    return shaped and typed and small and not torch.is_autocast_enabled(u.device.type)


class _CohortClassifier(torch.autograd.Function):
    """u: (clients, rows, channels); weight: (clients, classes, channels); bias: (clients, classes); the others: (clients, rows)."""

    @staticmethod
    def forward(
        ctx: Any,
        u: Tensor,
        weight: Tensor,
        bias: Tensor,
        y: Tensor,
        mask: Tensor | None,
        extra: Tensor | None,
        scale: float,
        share: float,
    ) -> Tensor:
        from fedloom.kernels import heads

        u, weight, bias, y = _laid(u), _laid(weight), _laid(bias), _laid(y)
        mask, extra = (None if t is None else _laid(t) for t in (mask, extra))
        value, residual = heads.classified(u, weight, bias, y, mask, extra, scale, share, UNUSED)
        ctx.save_for_backward(u, weight, bias, residual, mask)
        ctx.share, ctx.kind = share, None if extra is None else extra.dtype
        return value

    @staticmethod
    def backward(ctx: Any, dv: Tensor) -> tuple[Tensor | None, ...]:
        from fedloom.kernels import heads

        u, weight, bias, residual, mask = ctx.saved_tensors
        kind = ctx.kind if ctx.needs_input_grad[5] else None
        du, dw, db, de = heads.classified_back(
            u, weight, bias, residual, mask, kind, dv, ctx.share, inner=ctx.needs_input_grad[0]
        )
        return du, dw, db, None, None, de, None, None
