"""Orders of maps and filters in memory: convolutions are faster with channels last, but a model may depend on the plain order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fedloom import devices


def suited(value: Tensor) -> Tensor:
    """A leaf, or a map, in the layout in which convolutions are faster: with its channels last."""
    fits = value.dim() == 4 and value.is_floating_point()
    return value.to(memory_format=torch.channels_last) if fits else value


def indifferent(run: Callable[[bool], Sequence[Tensor]], device: torch.device) -> bool:
    """Whether a model returns the same in both orders: ``run(turned)`` calls it on a sample, on a device.

    One that calls ``view`` on a map that is turned fails; ``flatten`` and ``reshape`` are fine.
    """
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[device] if devices.is_gpu(device) else []):
            pairs = zip(run(False), run(True), strict=True)
            return all(torch.allclose(plain, turned, rtol=1e-2, atol=1e-3) for plain, turned in pairs)
    except Exception:
        return False
