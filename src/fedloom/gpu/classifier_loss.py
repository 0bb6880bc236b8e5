"""Mean cross-entropy of a cohort's linear classifiers, and the mean of another value per row.

With z = u W^T + b, its softmax p, the mask m, w = m / max(1, sum m) and G = w (p - [k = y]):

    L = sum w (log sum exp z - z_y)      v = sum w values
    du = dL G W      dW = dL G^T u      db = dL sum G      dvalues = dv w

The forward kernel stores w and G; the backward kernel reads them. Products are not TF32.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from fedloom.gpu.cohort import accumulator_types, apply_to_cohort, client_count, contiguous_per_client, is_cohort
from fedloom.ops.mapped import autocast_type
from fedloom.tasks.base import Task
from fedloom.tasks.batch import Batch
from fedloom.tasks.builtin import mean_cross_entropy

MAX_CLASSES, MAX_ROWS, MAX_PRODUCTS = 64, 1024, 1 << 26
"""Limits for one client, and of the products of a cohort: torch computes more of them faster."""


def classifier_loss(
    task: Task, batch: Batch, u: Tensor, weight: Tensor, bias: Tensor, *values: Tensor
) -> tuple[Tensor, ...] | None:
    """Return the loss of a linear classifier and the mean of at most one value per row, of one client inside ``vmap``.

    Plain form: :func:`fedloom.tasks.base.classifier_loss`.
    """
    per_row = [t for t in (batch.y, batch.mask, *values) if t is not None]
    supported = (
        task.mean is mean_cross_entropy
        and len(values) <= 1
        and u.dim() == 2
        and u.dtype in (torch.float32, torch.float64)
        and all(t.dtype == u.dtype for t in (weight, bias, *values))
        and all(t.shape == u.shape[:1] for t in per_row)
        and len(weight) <= MAX_CLASSES
        and 0 < len(u) <= MAX_ROWS
        and autocast_type(u) is None
        and is_cohort(weight, bias, shared=[u, *per_row])
        and client_count(weight) * u.numel() * len(weight) <= MAX_PRODUCTS
    )
    if not supported:
        return None
    results: tuple[Tensor, ...] = apply_to_cohort(_CohortClassifierLoss, u, weight, bias, batch.y, batch.mask, *values)
    return results


class _CohortClassifierLoss(torch.autograd.Function):
    """u: (clients, rows, channels); weight: (clients, classes, channels); bias: (clients, classes); others: (clients, rows)."""

    @staticmethod
    def forward(
        ctx: Any, u: Tensor, weight: Tensor, bias: Tensor, y: Tensor, mask: Tensor | None, *values: Tensor
    ) -> tuple[Tensor, ...]:
        (clients, rows, channels), classes, tile = u.shape, weight.shape[1], _tile(u, weight, 64)
        blocks = triton.cdiv(rows, tile["R"])
        others = [bias if mask is None else mask, *(values or [bias])]
        inputs = [contiguous_per_client(t) for t in (u, weight, bias, y, *others)]
        sums = [u.new_empty(clients, blocks) for _ in range(2)]
        row_weight, residual = u.new_empty(clients, rows), u.new_empty(clients, rows, classes)
        _forward_kernel[(clients, blocks)](
            *inputs, *sums, row_weight, residual, rows, channels, classes, *(t.stride(0) for t in inputs),
            MASKED=mask is not None, VALUES=bool(values), **tile, M=triton.next_power_of_2(rows), num_warps=8,
        )  # fmt: skip
        ctx.save_for_backward(u, weight, bias, y, row_weight, residual)
        return tuple(t[:, 0] if blocks == 1 else t.sum(1) for t in sums[: 1 + len(values)])

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor, *d_means: Tensor) -> tuple[Tensor | None, ...]:
        u, weight, bias, y, row_weight, residual = ctx.saved_tensors
        if torch.is_grad_enabled():  # torch's operations have second derivatives
            p = torch.baddbmm(bias[:, None], u, weight.mT).softmax(2)
            residual = row_weight[..., None] * (p - F.one_hot(y.long(), weight.shape[1]))
            d = d_loss[:, None, None] * residual
            return d @ weight, d.mT @ u, d.sum(1), None, None, *(row_weight * d_mean[:, None] for d_mean in d_means)
        (clients, rows, channels), tile = u.shape, _tile(u, weight, 32)
        inputs = [contiguous_per_client(t) for t in (u, weight)] + [d_loss, *(d_means or [d_loss])]
        grads = [t.new_empty(t.shape) for t in (u, weight, bias, row_weight)]
        _backward_kernel[(clients, triton.cdiv(channels, tile["B"]))](
            *inputs, row_weight, residual, *grads, rows, channels, weight.shape[1],
            *(t.stride(0) for t in inputs), VALUES=bool(d_means), **tile,
        )  # fmt: skip
        return *grads[:3], None, None, *grads[3 : 3 + len(d_means)]


def _tile(u: Tensor, weight: Tensor, max_rows: int) -> dict[str, Any]:
    """Return the type and the sizes of a program's tiles: rows, classes and channels. Triton's products need 16 of each."""
    sides = {"R": min(u.shape[1], max_rows), "K": weight.shape[1], "B": min(u.shape[2], 32)}
    return {"DTYPE": accumulator_types(u)[1]} | {n: max(16, triton.next_power_of_2(s)) for n, s in sides.items()}


@triton.jit
def _forward_kernel(
    u, weight, bias, y, mask, values, losses, means, row_weight, residual, rows, channels, classes,
    u_stride, weight_stride, bias_stride, y_stride, mask_stride, values_stride,
    MASKED: tl.constexpr, VALUES: tl.constexpr, DTYPE: tl.constexpr,
    R: tl.constexpr, K: tl.constexpr, B: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(0).to(tl.int64)
    block = client * tl.num_programs(1) + tl.program_id(1)
    row = tl.program_id(1) * R + tl.arange(0, R)
    k = tl.arange(0, K)
    valid_row, valid_class = row < rows, k < classes
    z = tl.zeros((R, K), DTYPE)
    for start in range(0, channels, B):
        c = start + tl.arange(0, B)
        valid = valid_row[:, None] & (c < channels)[None, :]
        features = tl.load(u + client * u_stride + row[:, None] * channels + c[None, :], mask=valid, other=0.0)
        valid = valid_class[:, None] & (c < channels)[None, :]
        filters = tl.load(weight + client * weight_stride + k[:, None] * channels + c[None, :], mask=valid, other=0.0)
        z = tl.dot(features, tl.trans(filters), z, input_precision="ieee", out_dtype=DTYPE)
    z += tl.load(bias + client * bias_stride + k, mask=valid_class, other=float("-inf"))[None, :]
    maximum = tl.max(z, 1)
    log_sum = maximum + tl.log(tl.sum(tl.exp(z - maximum[:, None]), 1))
    label = tl.load(y + client * y_stride + row, mask=valid_row, other=0)
    is_label = k[None, :] == label[:, None]
    factor = valid_row.to(DTYPE) / rows
    if MASKED:
        m = tl.arange(0, M)
        all_rows = tl.load(mask + client * mask_stride + m, mask=m < rows, other=0.0).to(DTYPE)
        factor = tl.load(mask + client * mask_stride + row, mask=valid_row, other=0.0).to(DTYPE)
        factor /= tl.maximum(tl.sum(all_rows, 0), 1.0)
    loss = log_sum - tl.sum(tl.where(is_label, z, 0.0), 1)
    tl.store(losses + block, tl.sum(factor * loss, 0))
    if VALUES:
        value = tl.load(values + client * values_stride + row, mask=valid_row, other=0.0)
        tl.store(means + block, tl.sum(factor * value, 0))
    tl.store(row_weight + client * rows + row, factor, mask=valid_row)
    index = (client * rows + row[:, None]) * classes + k[None, :]
    difference = tl.exp(z - log_sum[:, None]) - is_label.to(DTYPE)
    tl.store(residual + index, factor[:, None] * difference, mask=valid_row[:, None] & valid_class[None, :])


@triton.jit
def _backward_kernel(
    u, weight, d_loss, d_mean, row_weight, residual, du, dw, db, d_values, rows, channels, classes,
    u_stride, weight_stride, d_loss_stride, d_mean_stride,
    VALUES: tl.constexpr, DTYPE: tl.constexpr, R: tl.constexpr, K: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(0).to(tl.int64)
    c, k = tl.program_id(1) * B + tl.arange(0, B), tl.arange(0, K)
    valid_channel, valid_class = c < channels, k < classes
    index = k[:, None] * channels + c[None, :]
    valid = valid_class[:, None] & valid_channel[None, :]
    filters = tl.load(weight + client * weight_stride + index, mask=valid, other=0.0)
    loss_factor = tl.load(d_loss + client * d_loss_stride)
    filters_grad = tl.zeros((K, B), DTYPE)
    bias_grad = tl.zeros((K,), DTYPE)
    for start in range(0, rows, R):
        row = start + tl.arange(0, R)
        valid_row = row < rows
        at = client * rows + row
        z_grad = loss_factor * tl.load(
            residual + at[:, None] * classes + k[None, :], mask=valid_row[:, None] & valid_class[None, :], other=0.0
        )
        valid_feature = valid_row[:, None] & valid_channel[None, :]
        features = tl.load(u + client * u_stride + row[:, None] * channels + c[None, :], mask=valid_feature, other=0.0)
        filters_grad = tl.dot(tl.trans(z_grad), features, filters_grad, input_precision="ieee", out_dtype=DTYPE)
        bias_grad += tl.sum(z_grad, 0)
        features_grad = tl.dot(z_grad, filters, input_precision="ieee", out_dtype=DTYPE)
        tl.store(du + at[:, None] * channels + c[None, :], features_grad, mask=valid_feature)
        if VALUES:  # programs of other channels store the same
            value_grad = tl.load(d_mean + client * d_mean_stride) * tl.load(row_weight + at, mask=valid_row)
            tl.store(d_values + at, value_grad, mask=valid_row)
    tl.store(dw + client * classes * channels + index, filters_grad, mask=valid)
    tl.store(db + client * classes + k, bias_grad, mask=valid_class)  # likewise
