"""Momentum on the server."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from fedloom.spec.method import Method
from fedloom.spec.registry import plugin
from fedloom.spec.server_optimizer import server_step
from fedloom.tensors import Leaves

OWNER = "server_momentum"


@plugin(
    "0 <= beta < 1",
    "eta_s > 0",
    paper="Hsu et al., Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification, 2019",
)
def server_momentum(beta: float = 0.9, eta_s: float = 1.0) -> Callable[[Method], Method]:
    """Gives the server's steps momentum: ``v <- beta v + D``, ``w <- w + eta_s v``, with D the clients' mean update.

    On trainable leaves that are shared in the round; buffers stay plainly averaged. ``beta=0, eta_s=1`` changes nothing.

    Args:
        beta: momentum.
        eta_s: the server's step.

    Example:
        >>> import fedloom as fl
        >>> print(fl.compose(fl.fedper(), fl.server_momentum(beta=0.5)))
        fedper() + server_momentum(beta=0.5)
    """

    def step(delta: Tensor, state: Leaves) -> tuple[Tensor, Leaves]:
        v = beta * state["v"] + delta
        return (v if eta_s == 1 else eta_s * v), {"v": v}

    plain = beta == 0 and eta_s == 1
    return lambda method: method if plain else method.adding(server=(server_step(OWNER, {"v": 0.0}, step),))
