"""SGD and Adam on lists of tensors, in torch's own order of operations.

They equal ``torch.optim`` bit for bit. Tensors may hold many clients along axis 0; with ``active`` given, only those
whose entry is true move: parameters, momentum and moments of the others stay exactly as they were. One count of steps
serves all clients, because a client that has stopped never moves again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from fedloom.errors import UserError
from fedloom.ops.dispatch import operator

Tensors = list[Tensor]


@dataclass(slots=True)
class OptState:
    """Moments of an optimiser: lists parallel to the parameters, and the number of steps made.

    The number is a tensor inside a traced step, where a Python number would be baked in.
    """

    slots: dict[str, Tensors] = field(default_factory=dict)
    step: int | Tensor = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimizer:
    """An optimiser as data; make it with :func:`sgd`, :func:`adam` or :func:`adamw`."""

    name: Literal["sgd", "adam", "adamw"]
    lr: float
    momentum: float = 0.0
    nesterov: bool = False
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decay: float = 1.0
    schedule: Literal["exponential", "cosine"] = "exponential"
    grad_clip: float | None = None

    def __post_init__(self) -> None:
        checks = {
            "lr": self.lr >= 0,
            "momentum": 0 <= self.momentum < 1,
            "weight_decay": self.weight_decay >= 0,
            "decay": 0 < self.decay <= 1,
            "eps": self.eps > 0,
            "betas": all(0 <= b < 1 for b in self.betas),
            "grad_clip": self.grad_clip is None or self.grad_clip > 0,
        }
        for key, good in checks.items():
            if not good:
                raise UserError(f"{self.name}: {key}={getattr(self, key)!r} is out of range")
        if self.nesterov and self.momentum == 0:
            raise UserError("sgd: nesterov=True needs momentum > 0")

    def lr_at(self, round: int, rounds: int | None = None) -> float:
        """Learning rate in a round (from 1; 0 is the setup): ``lr * decay^(round-1)``, or half a cosine over all rounds."""
        if self.schedule == "cosine" and rounds:
            return self.lr * 0.5 * (1 + math.cos(math.pi * max(round - 1, 0) / rounds))
        return self.lr * self.decay ** max(round - 1, 0)

    def slots_of_state(self) -> tuple[str, ...]:
        """Names of the moments that it keeps."""
        return ("m", "v") if self.name != "sgd" else ("m",) if self.momentum else ()

    def init(self, params: Tensors) -> OptState:
        """Fresh state: zero moments."""
        return OptState({k: [torch.zeros_like(p) for p in params] for k in self.slots_of_state()})

    @torch.no_grad()
    def step_(
        self,
        params: Tensors,
        grads: Tensors,
        state: OptState,
        lr: float | Tensor,
        active: Tensor | None = None,
        *,
        batched: bool = False,
    ) -> None:
        """One step, in place.

        Args:
            params: the parameters.
            grads: their gradients.
            state: moments and number of steps.
            lr: learning rate; a tensor inside a traced step; one rate per client if it has an axis.
            active: per client whether it moves; None for all.
            batched: whether axis 0 is the client (gradients are then clipped client by client).
        """
        if not params:
            return
        if self.grad_clip is not None:
            grads = clipped(grads, self.grad_clip, batched=batched or active is not None)
        if active is None:
            optimizer_step(self, params, grads, state, lr)
            return
        moving = [params, *state.slots.values()]
        before = [[t.clone() for t in tensors] for tensors in moving]
        optimizer_step(self, params, grads, state, lr)
        for now, then in zip(moving, before, strict=True):
            for a, b in zip(now, then, strict=True):
                torch.where(along_clients(active, a), a, b, out=a) if isinstance(lr, float) else a.copy_(
                    torch.where(along_clients(active, a), a, b)
                )


@operator
def optimizer_step(
    optimizer: Optimizer, params: Tensors, grads: Tensors, state: OptState, lr: float | Tensor
) -> Tensors:
    """Update parameters and state in place, and return the parameters."""
    state.step += 1  # in place if it is a tensor, as in a captured step
    if optimizer.weight_decay and optimizer.name != "adamw":
        grads = list(torch._foreach_add(grads, params, alpha=optimizer.weight_decay))
    if optimizer.name == "sgd":
        if optimizer.momentum:
            m = state.slots["m"]
            torch._foreach_mul_(m, optimizer.momentum)
            torch._foreach_add_(m, grads)
            grads = list(torch._foreach_add(grads, m, alpha=optimizer.momentum)) if optimizer.nesterov else m
        if isinstance(lr, Tensor):
            torch._foreach_sub_(params, [g * _rate(lr, g) for g in grads])
        else:
            torch._foreach_add_(params, grads, alpha=-lr)
        return params
    m, v = state.slots["m"], state.slots["v"]
    b1, b2 = optimizer.betas
    if optimizer.name == "adamw" and isinstance(lr, Tensor):
        for p in params:
            p.mul_(1 - _rate(lr, p) * optimizer.weight_decay)
    elif optimizer.name == "adamw":
        torch._foreach_mul_(params, 1 - lr * optimizer.weight_decay)
    torch._foreach_lerp_(m, grads, 1 - b1)
    torch._foreach_mul_(v, b2)
    torch._foreach_addcmul_(v, grads, grads, 1 - b2)
    denom = torch._foreach_sqrt(v)
    if isinstance(lr, Tensor):
        second, rate = (1 - b2**state.step) ** 0.5, lr / (1 - b1**state.step)
        for p, mean, d in zip(params, m, denom, strict=True):
            p.sub_((_rate(rate, mean) * mean) / (d / second + optimizer.eps))
        return params
    torch._foreach_div_(denom, (1 - b2**state.step) ** 0.5)
    torch._foreach_add_(denom, optimizer.eps)
    torch._foreach_addcdiv_(params, m, denom, -lr / (1 - b1**state.step))
    return params


def _rate(rate: Tensor, like: Tensor) -> Tensor:
    """Return a rate that multiplies a tensor: one for all, or one per client along axis 0."""
    return along_clients(rate.to(like.dtype), like) if rate.dim() else rate


def along_clients(values: Tensor, like: Tensor) -> Tensor:
    """Reshape one value per client so that it broadcasts over a stacked tensor."""
    return values.reshape(-1, *[1] * (like.dim() - 1))


def clipped(grads: Tensors, bound: float, *, batched: bool = False) -> Tensors:
    """Gradients scaled so that their joint norm is at most ``bound``, for one client or for each of many."""
    if not batched:
        norm = torch.stack(torch._foreach_norm(grads)).norm()
        return list(torch._foreach_mul(grads, (bound / (norm + 1e-6)).clamp(max=1.0)))
    norms = torch.stack([g.reshape(g.shape[0], -1).norm(dim=1) for g in grads]).norm(dim=0)
    factor = (bound / (norms + 1e-6)).clamp(max=1.0)
    return [g * along_clients(factor, g) for g in grads]


def sgd(
    lr: float = 0.05,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    decay: float = 1.0,
    nesterov: bool = False,
    grad_clip: float | None = None,
    schedule: Literal["exponential", "cosine"] = "exponential",
) -> Optimizer:
    """Stochastic gradient descent; ``decay`` multiplies the rate after each round.

    Example:
        >>> sgd(lr=0.1, decay=0.5).lr_at(3)
        0.025
    """
    return Optimizer(
        name="sgd",
        lr=lr,
        momentum=momentum,
        weight_decay=weight_decay,
        decay=decay,
        nesterov=nesterov,
        grad_clip=grad_clip,
        schedule=schedule,
    )


def adam(
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decay: float = 1.0,
    grad_clip: float | None = None,
    schedule: Literal["exponential", "cosine"] = "exponential",
) -> Optimizer:
    """Adam with coupled weight decay, as ``torch.optim.Adam``."""
    return Optimizer(
        name="adam",
        lr=lr,
        betas=betas,
        eps=eps,
        weight_decay=weight_decay,
        decay=decay,
        grad_clip=grad_clip,
        schedule=schedule,
    )


def adamw(
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    decay: float = 1.0,
    grad_clip: float | None = None,
    schedule: Literal["exponential", "cosine"] = "exponential",
) -> Optimizer:
    """Adam with decoupled weight decay, as ``torch.optim.AdamW``."""
    return Optimizer(
        name="adamw",
        lr=lr,
        betas=betas,
        eps=eps,
        weight_decay=weight_decay,
        decay=decay,
        grad_clip=grad_clip,
        schedule=schedule,
    )


OPTIMIZERS = {"sgd": sgd, "adam": adam, "adamw": adamw}
