"""Recurrent layers that can be mapped over clients: ``nn.LSTM``, ``nn.GRU`` and ``nn.RNN`` step by step.

torch's own kernels have no rule for ``vmap``. Under it, these layers run the same equations one time step after another;
elsewhere they are torch's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Cell = Callable[[Tensor, tuple[Tensor, ...], Tensor, Tensor, Tensor | None, Tensor | None], tuple[Tensor, ...]]


def _lstm(x: Tensor, state: tuple[Tensor, ...], wi: Tensor, wh: Tensor, bi: Any, bh: Any) -> tuple[Tensor, ...]:
    h, c = state
    i, f, g, o = (nn.functional.linear(x, wi, bi) + nn.functional.linear(h, wh, bh)).chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def _gru(x: Tensor, state: tuple[Tensor, ...], wi: Tensor, wh: Tensor, bi: Any, bh: Any) -> tuple[Tensor, ...]:
    (h,) = state
    xr, xz, xn = nn.functional.linear(x, wi, bi).chunk(3, -1)
    hr, hz, hn = nn.functional.linear(h, wh, bh).chunk(3, -1)
    r, z = torch.sigmoid(xr + hr), torch.sigmoid(xz + hz)
    n = torch.tanh(xn + r * hn)
    return ((1 - z) * n + z * h,)


def _rnn(squash: Callable[[Tensor], Tensor]) -> Cell:
    def cell(x: Tensor, state: tuple[Tensor, ...], wi: Tensor, wh: Tensor, bi: Any, bh: Any) -> tuple[Tensor, ...]:
        (h,) = state
        return (squash(nn.functional.linear(x, wi, bi) + nn.functional.linear(h, wh, bh)),)

    return cell


class _Mapped(nn.RNNBase, ABC):
    """A recurrent layer whose weights are those that it holds now, and that runs under ``vmap``."""

    @property
    def _flat_weights(self) -> list[Any]:
        # torch keeps a list of its own, which does not follow when the leaves are exchanged.
        return [self._parameters[name] for name in self._flat_weights_names]

    @_flat_weights.setter
    def _flat_weights(self, value: list[Any]) -> None:
        pass

    def forward(self, input: Any, hx: Any = None) -> Any:
        if isinstance(input, Tensor) and input.dim() == 3:
            tensors = [t for t in (input, *self._flat_weights) if t is not None]
            if any(torch._C._functorch.is_batchedtensor(t) for t in tensors):
                return self._stepwise(input, hx)
        return super().forward(input, hx)

    def _stepwise(self, x: Tensor, hx: Any) -> Any:
        cell, parts = self._cell()
        x = x.transpose(0, 1) if self.batch_first else x
        ways = 2 if self.bidirectional else 1
        if hx is None:
            zero = x.new_zeros(x.shape[1], self.hidden_size)
            begin = [tuple(zero for _ in range(parts)) for _ in range(self.num_layers * ways)]
        else:
            given = hx if isinstance(hx, tuple) else (hx,)
            begin = [tuple(part[i] for part in given) for i in range(self.num_layers * ways)]
        ends = []
        for layer in range(self.num_layers):
            outputs = []
            for way in range(ways):
                tail = f"l{layer}{'_reverse' if way else ''}"
                weights = [
                    self._parameters.get(f"{n}_{tail}") for n in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
                ]
                state, seen = begin[layer * ways + way], []
                for t in reversed(range(x.shape[0])) if way else range(x.shape[0]):
                    state = cell(x[t], state, *weights)  # type: ignore[arg-type]
                    seen.append(state[0])
                ends.append(state)
                outputs.append(torch.stack(seen[::-1] if way else seen))
            x = torch.cat(outputs, -1)
            if self.dropout and self.training and layer + 1 < self.num_layers:
                keep = (self._noise(x) >= self.dropout).to(x.dtype)
                x = x * keep / (1 - self.dropout)
        last = tuple(torch.stack([end[i] for end in ends]) for i in range(parts))
        return x.transpose(0, 1) if self.batch_first else x, last if parts > 1 else last[0]

    def _noise(self, x: Tensor) -> Tensor:
        from fedloom.layers import uniform_like

        return uniform_like(x, x.shape)

    @abstractmethod
    def _cell(self) -> tuple[Cell, int]:
        """The equations of one time step, and how many tensors a state has."""


class MappedLSTM(_Mapped, nn.LSTM):
    """``nn.LSTM``; projections run on the loop engine only."""

    def _cell(self) -> tuple[Cell, int]:
        if self.proj_size:
            raise RuntimeError("an LSTM with proj_size cannot be run for many clients at once")
        return _lstm, 2


class MappedGRU(_Mapped, nn.GRU):
    """``nn.GRU``."""

    def _cell(self) -> tuple[Cell, int]:
        return _gru, 1


class MappedRNN(_Mapped, nn.RNN):
    """``nn.RNN``."""

    def _cell(self) -> tuple[Cell, int]:
        return _rnn(torch.relu if self.mode == "RNN_RELU" else torch.tanh), 1
