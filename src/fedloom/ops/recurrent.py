"""Recurrent layers of a whole cohort: one product for all time steps, then one product and one cell for each.

Tensors lie as (time, rows, clients, values): those of a time step are contiguous, and what a client has of it is a matrix that
batched products read and write where it lies. Cells work on the rows of all clients at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from fedloom.ops.dispatch import operator
from fedloom.ops.mapped import autocast_type, clients_at
from fedloom.ops.products import matmul_transposed, transpose_weight, weight_gradient
from fedloom.torch_internals import is_batched, is_wrapped, unwrapped

Kind = Literal["lstm", "gru", "tanh", "relu"]
SQUASHED: dict[str, Callable[[Tensor], Tensor]] = {"tanh": torch.tanh, "relu": torch.relu}
"""What plain recurrent layers make of a sum."""


def serves(*tensors: Tensor | None) -> bool:
    """Whether these tensors belong to one ``vmap``, with nothing else around it, and at least one of them to its clients."""
    wrapped = [t for t in tensors if t is not None and is_wrapped(t)]
    return bool(wrapped) and all(is_batched(t) and not is_wrapped(unwrapped(t)) for t in wrapped)


def equations(kind: Kind, x: Tensor, hidden: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """The next state of a cell in plain operations, and what its gradient is made of.

    Args:
        kind: of the cell.
        x: the input times its weights.
        hidden: the state times its weights.
        h: the state.
        c: the cell's memory, of an LSTM.
    """
    if kind == "lstm":
        i, f, g, o = (x + hidden).chunk(4, -1)
        i, f, g, o = torch.sigmoid(i), torch.sigmoid(f), torch.tanh(g), torch.sigmoid(o)
        c = f * c + i * g
        return o * torch.tanh(c), c, (i, f, g, o)
    if kind == "gru":
        xr, xz, xn = x.chunk(3, -1)
        hr, hz, hn = hidden.chunk(3, -1)
        r, z = torch.sigmoid(xr + hr), torch.sigmoid(xz + hz)
        n = torch.tanh(xn + r * hn)
        return n + z * (h - n), c, (r, z, n, h, hn)
    return SQUASHED[kind](x + hidden), c, ()


def layer(
    kind: Kind,
    x: Tensor,
    weights: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    state: tuple[Tensor, ...] | None,
    *,
    backwards: bool = False,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """One layer in one direction, of one client inside ``vmap``.

    Args:
        kind: of its cells.
        x: (time, rows, inputs).
        weights: of the input (gates, inputs) and of the state (gates, values), and their biases or None.
        state: (rows, values) each; None for zeros.
        backwards: whether time runs from the end to the beginning.

    Returns:
        (time, rows, values), and the last state.
    """
    begin: tuple[Tensor | None, ...] = (*(state or ()), None, None)[:2]
    tensors: list[Tensor | None] = [x, *weights, *begin]
    short = autocast_type(x)
    if short is not None:
        tensors = [None if t is None else t.to(short) for t in tensors]
    y, h, c = _Lifted.apply(kind, backwards, *tensors)  # type: ignore[no-untyped-call]
    return y, (h, c) if kind == "lstm" else (h,)


class _Lifted(torch.autograd.Function):
    """The layer of one client inside ``vmap``: the rule for ``vmap`` calls that of the cohort."""

    @staticmethod
    def forward(kind: Kind, backwards: bool, *tensors: Tensor | None) -> Any:
        raise AssertionError("a layer of cohorts only")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is kept: the rule below replaces the function before it is differentiated."""

    @staticmethod
    def vmap(info: Any, axes: Any, kind: Kind, backwards: bool, *tensors: Tensor | None) -> tuple[Any, Any]:
        places = (2, 0, 0, 0, 0, 1, 1)  # where clients stand in each tensor
        given = zip(tensors, axes[2:], places, strict=True)
        own = [clients_at(tensor, axis, info.batch_size, place) for tensor, axis, place in given]
        return _CohortLayer.apply(kind, backwards, *own), (2, 1, 1)  # type: ignore[no-untyped-call]


class _CohortLayer(torch.autograd.Function):
    """x: (time, rows, clients, inputs); weights: (clients, gates, ...); biases: (clients, gates); state: (rows, clients, values)."""

    @staticmethod
    def forward(
        ctx: Any,
        kind: Kind,
        backwards: bool,
        x: Tensor,
        wi: Tensor,
        wh: Tensor,
        bi: Tensor | None,
        bh: Tensor | None,
        h0: Tensor | None,
        c0: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        steps, rows, clients, _ = x.shape
        flat = x.flatten(0, 1)
        # Cells of a GRU take the products apart, since one bias stands inside of a bracket.
        apart = kind == "gru"
        bias = bi if apart or bi is None or bh is None else bi + bh
        inputs = flat.new_empty(steps * rows, *wi.shape[:2])
        matmul_transposed(flat.transpose(0, 1), wi, bias, inputs.transpose(0, 1))
        inputs = inputs.unflatten(0, (steps, rows))
        hidden = _filled(flat, steps * rows if apart else rows, wh, bh if apart else None)
        hidden = hidden.unflatten(0, (steps if apart else 1, rows))
        zeros = x.new_zeros(rows, clients, wh.shape[2])
        h, c = (zeros if t is None else t.contiguous() for t in (h0, c0))
        order = list(reversed(range(steps)) if backwards else range(steps))
        seen: list[Any] = [None] * steps
        kept, cells = list[Tensor](), [c]
        for t in order:
            if kind in ("tanh", "relu"):
                _multiply(inputs[t], h, wh, accumulate=True)
                h = SQUASHED[kind](inputs[t])
            else:
                part = hidden[t if apart else 0]
                _multiply(part, h, wh, accumulate=apart and bh is not None)
                h, c, gates = recurrent_cell(kind, inputs[t], part, h, c)
                kept.append(gates)
                cells.append(c)
            seen[t] = h
        y = torch.stack(seen)
        ctx.kind, ctx.order, ctx.kept = kind, order, len(kept)
        ctx.save_for_backward(flat, wi, wh, y, h0, *kept, *(cells if kind == "lstm" else ()))
        if kind != "lstm":
            ctx.mark_non_differentiable(c)
        return y, h, c

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dh: Tensor, dc: Tensor) -> tuple[Tensor | None, ...]:
        flat, wi, wh, y, h0, *rest = ctx.saved_tensors
        kind, order, kept, cells = ctx.kind, ctx.order, rest[: ctx.kept], rest[ctx.kept :]
        steps, rows = y.shape[:2]
        slopes = dy.clone(memory_format=torch.contiguous_format)
        slopes[order[-1]] += dh
        first = torch.zeros_like(slopes[0]) if ctx.needs_input_grad[7] else None
        inputs: list[Any] = [None] * steps
        hidden: list[Any] = [None] * steps if kind == "gru" else inputs
        across: Tensor | None = None
        for n in reversed(range(steps)):
            t = order[n]
            before = slopes[order[n - 1]] if n else first
            if kind == "lstm":
                inputs[t], dc = lstm_cell_backward(slopes[t], dc, cells[n], cells[n + 1], kept[n])
            elif kind == "gru":
                inputs[t], hidden[t], straight = gru_cell_backward(slopes[t], kept[n])
                if before is not None:
                    before += straight
            elif kind == "tanh":
                inputs[t] = torch.ops.aten.tanh_backward(slopes[t], y[t])
            else:
                inputs[t] = torch.ops.aten.threshold_backward(slopes[t], y[t], 0)
            if before is not None:
                across = transpose_weight(hidden[t].transpose(0, 1), wh) if across is None else across
                _multiply(before, hidden[t], across, accumulate=True)
        _, _, wants_x, wants_wi, wants_wh, wants_bi, wants_bh, _, wants_c = ctx.needs_input_grad
        d = torch.stack(inputs).flatten(0, 1)
        dg = d if hidden is inputs else torch.stack(hidden).flatten(0, 1)
        dx = dwi = dwh = None
        if wants_x:
            dx = flat.new_empty(flat.shape)
            _multiply(dx, d, transpose_weight(d.transpose(0, 1), wi))
            dx = dx.unflatten(0, (steps, rows))
        if wants_wi:
            dwi = weight_gradient(d.transpose(0, 1), flat.transpose(0, 1))
        if wants_wh:
            early, late = slice(None, -rows), slice(rows, None)
            early, late = (early, late) if order[0] == 0 else (late, early)
            states = y.flatten(0, 1)
            dwh = weight_gradient(dg[late].transpose(0, 1), states[early].transpose(0, 1))
            if h0 is not None:
                start = order[0] * rows
                dwh.baddbmm_(dg[start : start + rows].permute(1, 2, 0), h0.transpose(0, 1))
        dbi = d.sum(0) if wants_bi else None
        dbh = dg.sum(0) if wants_bh else None
        return None, None, dx, dwi, dwh, dbi, dbh, first, dc if wants_c else None


def _filled(like: Tensor, rows: int, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Room for a product (rows, clients, gates), with the bias in it where there is one."""
    room = like.new_empty(rows, *weight.shape[:2])
    return room if bias is None else room.copy_(bias.expand_as(room))


def _multiply(out: Tensor, left: Tensor, right: Tensor, *, accumulate: bool = False) -> None:
    """``out_c = left_c right_c^T``, or that added to it, of each client c; out and left are (rows, clients, values)."""
    matmul_transposed(left.transpose(0, 1), right, None, out.transpose(0, 1), accumulate=accumulate)


@operator
def recurrent_cell(kind: Kind, x: Tensor, hidden: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the next state of the rows of all clients, and the gates for the backward pass."""
    h, c, gates = equations(kind, x, hidden, h, c)
    return h, c, torch.cat(gates, -1)


@operator
def lstm_cell_backward(dh: Tensor, dc: Tensor, before: Tensor, after: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of the gates and of the previous cells."""
    i, f, g, o = kept.chunk(4, -1)
    squashed = torch.tanh(after)
    d = dh * o * (1 - squashed * squashed) + dc
    gates = [d * g * (1 - i) * i, d * before * (1 - f) * f, d * i * (1 - g * g), dh * squashed * (1 - o) * o]
    return torch.cat(gates, -1), d * f


@operator
def gru_cell_backward(dh: Tensor, kept: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the input's gates, of the state's gates, and of the previous state."""
    r, z, n, h, hn = kept.chunk(5, -1)
    dz = dh * (h - n) * (1 - z) * z
    dn = dh * (1 - z) * (1 - n * n)
    dr = dn * hn * (1 - r) * r
    return torch.cat([dr, dz, dn], -1), torch.cat([dr, dz, dn * r], -1), dh * z
