"""Choice of the device, and its precision during a run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

from fedloom.errors import UserError
from fedloom.ops import precision as numerics

PRECISIONS = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.float32, "fp64": torch.float64}


def device_of(name: str) -> torch.device:
    """The device of a name."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"device={name!r}: expected auto, cpu or cuda") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device={name!r}: no CUDA device is available here; use device='cpu'")
    return device


def products(device: torch.device, precision: str) -> contextlib.AbstractContextManager[None]:
    """TF32 in all products while it lasts, where a run asks for it; otherwise torch's settings as the user has them."""
    asked = device.type == "cuda" and precision == "tf32"
    return numerics.tf32(products=True, convolutions=True) if asked else contextlib.nullcontext()


@contextlib.contextmanager
def exact(device: torch.device, wanted: bool) -> Iterator[None]:
    """Only deterministic kernels while it lasts; the CPU has no others here.

    Raises:
        UserError: torch has no deterministic kernel for something that the model does.
    """
    if not wanted or device.type != "cuda":
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
