"""Orders of maps and filters in memory: convolutions are faster with channels last, but a model may depend on the plain order."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fedloom import layers
from fedloom.kernels.cohort import present


def suited(value: Tensor) -> Tensor:
    """A leaf, or a map, in the layout in which convolutions are faster: with its channels last."""
    fits = value.dim() == 4 and value.is_floating_point()
    return value.to(memory_format=torch.channels_last) if fits else value


def settle(module: nn.Module, run: Callable[[], Tensor]) -> None:
    """Lets pooled maps keep their channels last where kernels make them so, unless the model depends on their order.

    One that calls ``view`` on them does; ``flatten`` and ``reshape`` are fine.

    Args:
        module: the model, prepared.
        run: calls it on a sample, in evaluation mode.
    """
    chained = [part for part in module.modules() if "_chain_last" in vars(part)]
    pools = [part for part in module.modules() if type(part) is layers.CohortMaxPool2d and part.window() is not None]
    first = next(module.parameters(), None)
    if not chained or not pools or first is None or not present(first):
        return
    with torch.no_grad(), torch.random.fork_rng(devices={first.device} if first.is_cuda else ()):
        plain = run()
        hooks = [pool.register_forward_hook(lambda _, args, y: suited(y)) for pool in pools]
        try:
            same = torch.allclose(run(), plain, rtol=1e-2, atol=1e-3)
        except Exception:
            same = False
    for hook in hooks:
        hook.remove()
    for part in chained:
        vars(part)["_chain_last"] = same
