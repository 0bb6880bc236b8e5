"""Recurrent layers that can be mapped over clients: ``nn.LSTM``, ``nn.GRU`` and ``nn.RNN`` step by step.

torch's own kernels have no rule for ``vmap``. Under it, these layers run the same equations one time step after another, for all
clients at once; elsewhere they are torch's. Gradients that are differentiated again are made of plain operations.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from fedloom.ops import recurrent
from fedloom.ops.forward_context import uniform_like
from fedloom.torch_internals import LiveWeightsRNN, is_batched, is_wrapped, unwrapped

Weights = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


def _layer(
    kind: recurrent.Kind, x: Tensor, weights: Weights, state: tuple[Tensor, ...] | None, *, backwards: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """As the cohort's layer, of plain operations."""
    wi, wh, bi, bh = weights
    zero = x.new_zeros(x.shape[1], wh.shape[1])
    h, c, *_ = (*(state or ()), zero, zero)
    inputs, seen = nn.functional.linear(x, wi, bi), []
    for t in reversed(range(len(x))) if backwards else range(len(x)):
        h, c, _ = recurrent.equations(kind, inputs[t], nn.functional.linear(h, wh, bh), h, c)
        seen.append(h)
    return torch.stack(seen[::-1] if backwards else seen), (h, c) if kind == "lstm" else (h,)


def _of_a_cohort(x: Tensor) -> bool:
    """Whether a tensor is one client's inside ``vmap``, also inside a gradient there."""
    while is_wrapped(x):
        if is_batched(x):
            return True
        x = unwrapped(x)
    return False


class _Mapped(LiveWeightsRNN, ABC):
    """A recurrent layer that runs under ``vmap``."""

    def forward(self, input: Any, hx: Any = None) -> Any:
        if isinstance(input, Tensor) and input.dim() == 3:
            tensors = [t for t in (input, *self.flat_weights()) if t is not None]
            if any(_of_a_cohort(t) for t in tensors):
                return self._stepwise(input, hx)
        return super().forward(input, hx)

    def _stepwise(self, x: Tensor, hx: Any) -> Any:
        kind = self._kind()
        x = x.transpose(0, 1) if self.batch_first else x
        ways = 2 if self.bidirectional else 1
        given = () if hx is None else (hx,) if isinstance(hx, Tensor) else tuple(hx)
        ends = []
        for layer in range(self.num_layers):
            outputs = []
            for way in range(ways):
                tail = f"l{layer}{'_reverse' if way else ''}"
                wi, wh, bi, bh = (
                    getattr(self, f"{n}_{tail}", None) for n in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
                )
                assert wi is not None and wh is not None
                state = tuple(part[layer * ways + way] for part in given) or None
                together = recurrent.serves(x, wi, wh, bi, bh, *(state or ()))
                run = recurrent.layer if together else _layer
                seen, end = run(kind, x, (wi, wh, bi, bh), state, backwards=bool(way))
                outputs.append(seen)
                ends.append(end)
            x = torch.cat(outputs, -1) if ways > 1 else outputs[0]
            if self.dropout and self.training and layer + 1 < self.num_layers:
                keep = (uniform_like(x, x.shape) >= self.dropout).to(x.dtype)
                x = x * keep / (1 - self.dropout)
        last = tuple(torch.stack(parts) for parts in zip(*ends, strict=True))
        return x.transpose(0, 1) if self.batch_first else x, last if kind == "lstm" else last[0]

    @abstractmethod
    def _kind(self) -> recurrent.Kind:
        """Of the cells."""


class MappedLSTM(_Mapped, nn.LSTM):
    """``nn.LSTM``; projections run on the loop engine only."""

    def _kind(self) -> recurrent.Kind:
        if self.proj_size:
            raise RuntimeError("an LSTM with proj_size cannot be run for many clients at once")
        return "lstm"


class MappedGRU(_Mapped, nn.GRU):
    """``nn.GRU``."""

    def _kind(self) -> recurrent.Kind:
        return "gru"


class MappedRNN(_Mapped, nn.RNN):
    """``nn.RNN``."""

    def _kind(self) -> recurrent.Kind:
        return "relu" if self.mode == "RNN_RELU" else "tanh"
