"""Torch's fused optimisers: a step in one pass over memory; rate and count are read from the device, as a captured step needs."""

from __future__ import annotations

import torch
from torch import Tensor

from fedloom.optim import Optimizer, OptState, Tensors


def moved(optimizer: Optimizer, params: Tensors, grads: Tensors, state: OptState, lr: float | Tensor) -> Tensors | None:
    """:func:`fedloom.optim.moved` for float32, with a rate that is a tensor."""
    if not isinstance(lr, Tensor) or lr.dim() or not lr.is_cuda or {p.dtype for p in params} != {torch.float32}:
        return None
    state.step += 1  # in place where it is a tensor, as in a captured step
    fused(optimizer, params, grads, state, lr)
    return params


def fused(optimizer: Optimizer, params: Tensors, grads: Tensors, state: OptState, lr: Tensor) -> None:
    """The step, on any device."""
    grads = [g if g.stride() == p.stride() else g.contiguous() for p, g in zip(params, grads, strict=True)]
    rate, decay = lr.to(torch.float32), optimizer.weight_decay
    if optimizer.name == "sgd":
        torch._fused_sgd_(
            params, grads, state.slots.get("m", []), weight_decay=decay, momentum=optimizer.momentum, lr=rate,
            dampening=0.0, nesterov=optimizer.nesterov, maximize=False, is_first_step=False,
        )  # fmt: skip
        return
    count = torch.as_tensor(state.step, dtype=torch.float32, device=lr.device)
    step = torch._fused_adamw_ if optimizer.name == "adamw" else torch._fused_adam_
    step(
        params, grads, state.slots["m"], state.slots["v"], [], [count] * len(params), lr=rate, beta1=optimizer.betas[0],
        beta2=optimizer.betas[1], weight_decay=decay, eps=optimizer.eps, amsgrad=False, maximize=False,
    )  # fmt: skip
