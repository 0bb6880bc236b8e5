"""Torch's fused LSTM and GRU cells: one kernel per cell and one for its gradient, for the rows of all clients."""

from __future__ import annotations

import torch
from torch import Tensor

from fedloom.ops.recurrent import Kind


def recurrent_cell(kind: Kind, x: Tensor, hidden: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """Compute the next state. The last output is the workspace for the gradients below.

    Plain form: :func:`fedloom.ops.recurrent.recurrent_cell`.
    """
    if not x.is_cuda or not len(x):
        return None
    x_rows, hidden_rows = x.flatten(0, 1), hidden.flatten(0, 1)
    if kind == "lstm":
        next_h, next_c, workspace = torch.ops.aten._thnn_fused_lstm_cell(x_rows, hidden_rows, c.flatten(0, 1))
        return next_h.view(h.shape), next_c.view(c.shape), workspace
    next_h, workspace = torch.ops.aten._thnn_fused_gru_cell(x_rows, hidden_rows, h.flatten(0, 1))
    return next_h.view(h.shape), c, workspace


def lstm_cell_backward(
    dh: Tensor, dc: Tensor, before: Tensor, after: Tensor, workspace: Tensor
) -> tuple[Tensor, Tensor] | None:
    """Compute the gradients of the gates and of the cell. Plain form: :func:`fedloom.ops.recurrent.lstm_cell_backward`."""
    if not dh.is_cuda or not len(dh):
        return None
    flat = [t.contiguous().flatten(0, 1) for t in (dh, dc, before, after)]
    gates, cells, _ = torch.ops.aten._thnn_fused_lstm_cell_backward_impl(*flat, workspace, False)
    return gates.view(*dh.shape[:2], -1), cells.view(dh.shape)


def gru_cell_backward(dh: Tensor, workspace: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """Compute the gradients of both gates and of the state. Plain form: :func:`fedloom.ops.recurrent.gru_cell_backward`."""
    if not dh.is_cuda or not len(dh):
        return None
    gradients = torch.ops.aten._thnn_fused_gru_cell_backward(dh.flatten(0, 1), workspace, False)
    input_gates, hidden_gates, state = (t.view(*dh.shape[:2], -1) for t in gradients[:3])
    return input_gates, hidden_gates, state
