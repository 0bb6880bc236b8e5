"""Torch's fused optimisers: one pass over memory per step. They read rate and step count on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from fedloom.spec.optimizer import Optimizer, OptState, Tensors


def optimizer_step(
    optimizer: Optimizer, params: Tensors, grads: Tensors, state: OptState, lr: float | Tensor
) -> Tensors | None:
    """Update float32 parameters in place if the rate is a CUDA tensor.

    Plain form: :func:`fedloom.spec.optimizer.optimizer_step`.
    """
    if not isinstance(lr, Tensor) or lr.dim() or not lr.is_cuda or {p.dtype for p in params} != {torch.float32}:
        return None
    state.step += 1  # in place if it is a tensor, as in a captured step
    fused_step(optimizer, params, grads, state, lr)
    return params


def fused_step(optimizer: Optimizer, params: Tensors, grads: Tensors, state: OptState, lr: Tensor) -> None:
    """Update parameters and moments in place, on any device."""
    grads = [g if g.stride() == p.stride() else g.contiguous() for p, g in zip(params, grads, strict=True)]
    rate, decay = lr.to(torch.float32), optimizer.weight_decay
    if optimizer.name == "sgd":
        torch._fused_sgd_(
            params, grads, state.slots.get("m", []), weight_decay=decay, momentum=optimizer.momentum, lr=rate,
            dampening=0.0, nesterov=optimizer.nesterov, maximize=False, is_first_step=False,
        )  # fmt: skip
        return
    count = torch.as_tensor(state.step, dtype=torch.float32, device=lr.device)
    adam = torch._fused_adamw_ if optimizer.name == "adamw" else torch._fused_adam_
    adam(
        params, grads, state.slots["m"], state.slots["v"], [], [count] * len(params), lr=rate, beta1=optimizer.betas[0],
        beta2=optimizer.betas[1], weight_decay=decay, eps=optimizer.eps, amsgrad=False, maximize=False,
    )  # fmt: skip
