"""The device of a run, questions about devices, and copies between host and device.

The host waits for the device where it reads a value: :func:`read_scalars`, :func:`synchronise`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Device:
    """A device and a precision, which a network is built for.

    Only :func:`fedloom.engines.choose_device.choose_device` creates one. So the kernels of a device
    are registered before any network is built for it.

    Args:
        torch_device: where tensors are stored.
        precision: ``"fp32"``, ``"tf32"``, ``"bf16"`` or ``"fp64"``.
        dtype: floating type of weights and inputs.
        autocast: floating type of products under autocast; None: no autocast.
        has_gpu_package: whether :mod:`fedloom.gpu` is loaded for the device.
    """

    torch_device: torch.device
    precision: str
    dtype: torch.dtype
    autocast: torch.dtype | None
    has_gpu_package: bool


def device_kind(device: torch.device) -> str:
    """Return the kind of a device, for example ``"cpu"`` or ``"cuda"``."""
    return device.type


def is_gpu(device: torch.device) -> bool:
    """Return whether a device is a CUDA device."""
    return device_kind(device) == "cuda"


def on_host(value: Tensor) -> bool:
    """Return whether the host can read a tensor without waiting for another device."""
    return device_kind(value.device) == "cpu"


def to_device_async(value: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device. The host does not wait: CUDA copies from pinned memory asynchronously."""
    if is_gpu(device) and on_host(value):
        return value.pin_memory().to(device, non_blocking=True)
    return value.to(device)


def read_scalars(values: Sequence[Tensor]) -> list[float]:
    """Read tensors of one element, of any types, as numbers. Waits for the device once.

    Example:
        >>> read_scalars([torch.tensor(1.5), torch.tensor(2.0, dtype=torch.float64)])
        [1.5, 2.0]
    """
    if all(map(on_host, values)):
        return [float(v) for v in values]
    return torch.stack([v.reshape(()).double() for v in values]).tolist()


def synchronise(device: torch.device) -> None:
    """Wait until a device has finished all its work, so that measured times are true."""
    if is_gpu(device):
        torch.cuda.synchronize(device)


def memory_budget(device: torch.device, fraction: float) -> int | None:
    """Return a fraction of a GPU's memory in bytes; None for the host, which swaps."""
    if not is_gpu(device):
        return None
    return int(torch.cuda.get_device_properties(device).total_memory * fraction)


def free_cached_memory() -> None:
    """Return the memory that torch caches on the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def gpu_name() -> str | None:
    """Return the name of the current GPU; None if there is none."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def select_gpu(number: int) -> bool:
    """Make GPU ``number``, modulo the number of GPUs, the current one. Returns whether there is a GPU."""
    if not torch.cuda.is_available():
        return False
    torch.cuda.set_device(number % torch.cuda.device_count())
    return True
