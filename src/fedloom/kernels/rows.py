"""Means over a cohort's rows and distances to the centres of their classes, on CUDA under ``vmap``: one kernel each way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedloom.kernels.cohort import _Lifted, serves


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """``sum(m v) / max(1, sum m)`` of one value per row, m being 1 for real rows and 0 for padding."""
    fits = values.dim() == 1 and values.shape == mask.shape and values.is_floating_point() and values.numel()
    if not fits or not serves(values, mask):
        mask = mask.to(values.dtype)
        return (values * mask).sum() / mask.sum().clamp(min=1)
    mean: Tensor = _Lifted.apply(_CohortMean, values, mask)  # type: ignore[no-untyped-call]
    return mean


def class_distances(z: Tensor, y: Tensor, centres: Tensor, known: Tensor) -> Tensor:
    """``known[y] ||z - centres[y]||^2 / D`` of each row.

    Args:
        z: rows x D.
        y: the rows' classes.
        centres: classes x D.
        known: per class 1 where it has a centre, else 0.
    """
    if not z.numel() or not serves(z, y, shared=(centres, known)):
        return known[y] * ((z - centres[y]) ** 2).mean(1)
    value: Tensor = _Lifted.apply(_CohortDistances, z, y, centres, known)  # type: ignore[no-untyped-call]
    return value


class _CohortMean(torch.autograd.Function):
    """values, mask: (clients, rows)."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, mask: Tensor) -> Tensor:
        from fedloom.kernels import distances

        mask = mask.contiguous()
        mean, count = distances.means(values.contiguous(), mask)
        ctx.save_for_backward(mask, count)
        ctx.kind = values.dtype
        return mean.to(values.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        from fedloom.kernels import distances

        mask, count = ctx.saved_tensors
        return distances.means_back(mask, count, dy.contiguous(), ctx.kind), None


class _CohortDistances(torch.autograd.Function):
    """z: (clients, rows, D); y: (clients, rows); centres: (clients, classes, D); known: (clients, classes)."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, y: Tensor, centres: Tensor, known: Tensor) -> Tensor:
        from fedloom.kernels import distances

        z, y, centres, known = z.contiguous(), y.contiguous(), _laid(centres), _laid(known)
        value = distances.distances(z, y, centres, known)
        ctx.save_for_backward(z, y, centres, known)
        return value

    @staticmethod
    def backward(ctx: Any, dv: Tensor) -> tuple[Tensor, None, Tensor | None, None]:
        from fedloom.kernels import distances

        z, y, centres, known = ctx.saved_tensors
        trained = ctx.needs_input_grad[2]
        dz, dc = distances.distances_back(z, y, centres, known, dv.contiguous(), trained=trained)
        return dz, None, dc, None


def _laid(value: Tensor) -> Tensor:
    """A cohort's tensor of which every client's part lies without gaps; what all clients share is not copied."""
    return value if value[0].is_contiguous() else value.contiguous()
