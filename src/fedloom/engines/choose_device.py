"""The choice of the device, and torch's settings for it during a run."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
from collections.abc import Iterator

import torch

from fedloom.devices import Device, is_gpu
from fedloom.engines.load import is_installed, load
from fedloom.errors import UserError
from fedloom.ops import dispatch
from fedloom.ops import precision as numerics

PRECISIONS: dict[str, tuple[torch.dtype, torch.dtype | None]] = {
    "fp32": (torch.float32, None),
    "tf32": (torch.float32, None),
    "bf16": (torch.float32, torch.bfloat16),
    "fp64": (torch.float64, None),
}
"""The floating type and the type under autocast of each precision."""


def choose_device(name: str, precision: str) -> Device:
    """Choose the device and the precision of a run, and load what networks need there.

    The first of the two steps of construction, before the network is built; see
    :func:`fedloom.runs.choose_engine.choose_engine` for the second. For CUDA, and for Triton's
    interpreter, it loads the GPU package, whose kernels decide which layers are fused. Without the
    package or without triton, the plain formulas compute everything.

    Args:
        name: ``"auto"`` (CUDA if there is a GPU), ``"cpu"``, ``"cuda"`` or another name of torch.
        precision: a key of :data:`PRECISIONS`.

    Raises:
        UserError: the device or the precision does not exist.
    """
    device = _find_device(name)
    if precision not in PRECISIONS:
        raise UserError(f"precision={precision!r}: expected {', '.join(PRECISIONS)}")
    has_gpu_package = (is_gpu(device) or dispatch.INTERPRETED) and _load_gpu_package()
    return Device(device, precision, *PRECISIONS[precision], has_gpu_package)


def _find_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"device={name!r}: expected auto, cpu or cuda") from None
    if is_gpu(device) and not torch.cuda.is_available():
        raise UserError(f"device={name!r}: no CUDA device is available here; use device='cpu'")
    return device


@functools.cache
def _load_gpu_package() -> bool:
    """Load the GPU package once per process. Returns whether it is installed.

    Its kernels need triton; its captured steps do not.
    """
    if not is_installed("gpu"):
        return False
    if importlib.util.find_spec("triton") is not None:
        load("gpu.register").register()
    return True


def use_tf32(device: Device) -> contextlib.AbstractContextManager[None]:
    """Allow TF32 in all products on CUDA with precision ``"tf32"``; else change no setting."""
    if is_gpu(device.torch_device) and device.precision == "tf32":
        return numerics.tf32(products=True, convolutions=True)
    return contextlib.nullcontext()


@contextlib.contextmanager
def use_deterministic_kernels(device: Device, deterministic: bool) -> Iterator[None]:
    """Run deterministic CUDA kernels only, if ``deterministic``. On a CPU all are deterministic.

    Raises:
        UserError: torch has no deterministic kernel for an operation of the model.
    """
    if not deterministic or not is_gpu(device.torch_device):
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        reason = str(error).split(".")[0]
        raise UserError(f"deterministic=True: {reason}; use another layer, the CPU, or deterministic=False") from error
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.benchmark = before[1]
