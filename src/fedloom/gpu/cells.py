"""Torch's fused cells of recurrent layers, for rows of all clients: one kernel for a cell, and one for its gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from fedloom.ops.recurrent import Kind


def cell(kind: Kind, x: Tensor, hidden: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """:func:`fedloom.ops.recurrent.cell`; what it keeps is for the functions below."""
    if not x.is_cuda or not len(x):
        return None
    one, two, before = x.flatten(0, 1), hidden.flatten(0, 1), (c if kind == "lstm" else h).flatten(0, 1)
    if kind == "lstm":
        moved, after, kept = torch.ops.aten._thnn_fused_lstm_cell(one, two, before)
        return moved.view(h.shape), after.view(c.shape), kept
    moved, kept = torch.ops.aten._thnn_fused_gru_cell(one, two, before)
    return moved.view(h.shape), c, kept


def lstm_back(dh: Tensor, dc: Tensor, before: Tensor, after: Tensor, kept: Tensor) -> tuple[Tensor, Tensor] | None:
    """:func:`fedloom.ops.recurrent.lstm_back`."""
    if not dh.is_cuda or not len(dh):
        return None
    flat = [t.contiguous().flatten(0, 1) for t in (dh, dc, before, after)]
    gates, cells, _ = torch.ops.aten._thnn_fused_lstm_cell_backward_impl(*flat, kept, False)
    return gates.view(*dh.shape[:2], -1), cells.view(dh.shape)


def gru_back(dh: Tensor, kept: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """:func:`fedloom.ops.recurrent.gru_back`."""
    if not dh.is_cuda or not len(dh):
        return None
    found = torch.ops.aten._thnn_fused_gru_cell_backward(dh.flatten(0, 1), kept, False)
    one, two, straight = (t.view(*dh.shape[:2], -1) for t in found[:3])
    return one, two, straight
