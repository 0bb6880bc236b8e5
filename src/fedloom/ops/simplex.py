"""Convex quadratic programs on the simplex, many at once, in float64."""

from __future__ import annotations

import torch
from torch import Tensor

ITERATIONS = 3000
STILL = 1e-14
SUPPORT = 1e-9


def project(v: Tensor) -> Tensor:
    """The nearest points of the simplex, along the last axis: ``max(v - t, 0)`` with t such that they add up to 1.

    Example:
        >>> project(torch.tensor([[0.5, 2.0]])).tolist()
        [[0.0, 1.0]]
    """
    ordered = v.sort(-1, descending=True)[0]
    excess = ordered.cumsum(-1) - 1
    rank = torch.arange(1, v.shape[-1] + 1, dtype=v.dtype, device=v.device)
    held = (ordered * rank > excess).sum(-1, keepdim=True)
    return (v - excess.gather(-1, held - 1) / held).clamp(min=0)


def minimise(P: Tensor) -> Tensor:
    """``argmin_a a^T P a`` over the simplex for each of a stack of positive semi-definite matrices.

    Accelerated projected gradient with restarts finds which weights are positive; on those the optimality conditions
    ``P a = c 1`` are then solved directly, and that answer is taken where it is feasible and no worse.

    Args:
        P: matrices, K x M x M.

    Returns:
        Weights, K x M, in float64.

    Example:
        >>> minimise(torch.diag(torch.tensor([1.0, 3.0]))[None]).tolist()
        [[0.75, 0.25]]
    """
    P = P.double()
    P = P / torch.linalg.eigvalsh(P).amax(-1).clamp(min=1e-300)[:, None, None]
    a = torch.full(P.shape[:2], 1 / P.shape[2], dtype=torch.float64, device=P.device)
    ahead, t = a, torch.ones_like(a[:, :1])
    for _ in range(ITERATIONS):
        new = project(ahead - _times(P, ahead))
        back = ((ahead - new) * (new - a)).sum(1, keepdim=True) > 0
        t = torch.where(back, 1.0, t)
        later = (1 + (1 + 4 * t * t).sqrt()) / 2
        ahead = new + (t - 1) / later * (new - a)
        moved, a, t = float((new - a).abs().max()), new, later
        if moved < STILL:
            break
    return _polished(P, a)


def _polished(P: Tensor, a: Tensor) -> Tensor:
    on = (a > SUPPORT).double()
    ridge = torch.diag_embed(1 - on + 1e-13)
    exact = torch.linalg.solve(on[:, :, None] * P * on[:, None, :] + ridge, on)
    total = exact.sum(1, keepdim=True)
    exact = torch.where(total > 0, exact / total, a)
    better = (exact * _times(P, exact)).sum(1) <= (a * _times(P, a)).sum(1)
    good = better & (exact >= 0).all(1)
    return torch.where(good[:, None], exact, a)


def _times(P: Tensor, a: Tensor) -> Tensor:
    return (P @ a[:, :, None])[:, :, 0]
