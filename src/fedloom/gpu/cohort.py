"""Helpers of all kernels: conditions for their use, the call for a whole cohort, sizes of Triton tiles."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fedloom.ops.dispatch import INTERPRETED
from fedloom.ops.mapped import clients_at
from fedloom.torch_internals import is_batched

# Conditions ----------------------------------------------------------------------------------------------


def is_available(x: Tensor) -> bool:
    """Return whether kernels can run on the device of a tensor."""
    return x.is_cuda or INTERPRETED


def is_cohort(*tensors: Tensor | None, shared: Iterable[Tensor] = ()) -> bool:
    """Return whether kernels can run on these tensors of one client inside ``vmap``.

    They cannot on a CPU, outside ``vmap``, inside nested transforms, and during tracing.

    Args:
        tensors: tensors that must differ between clients.
        shared: tensors that may be equal for all clients.
    """
    functorch = torch._C._functorch
    wrapped = (t for t in shared if functorch.is_functorch_wrapped_tensor(t))
    all_tensors = [t for t in (*tensors, *wrapped) if t is not None]
    if not is_available(all_tensors[0]) or not all(is_batched(t) for t in all_tensors):
        return False
    stacks = [functorch.get_unwrapped(t) for t in all_tensors]
    return not any(functorch.is_functorch_wrapped_tensor(t) or isinstance(t, FakeTensor) for t in stacks)


def is_cohort_with_shared_filters(x: Tensor, w: Tensor, bias: Tensor | None) -> bool:
    """Return whether kernels support a layer of several clients, who may share ``w`` and ``bias``, of equal dtype."""
    shared = [w] if bias is None else [w, bias]
    return all(t.dtype == x.dtype for t in shared) and is_cohort(x, shared=shared) and client_count(x) > 1


def client_count(x: Tensor) -> int:
    """Return the number of clients of a tensor inside ``vmap``."""
    return int(torch._C._functorch.get_unwrapped(x).shape[torch._C._functorch.maybe_get_bdim(x)])


# The call for a whole cohort -----------------------------------------------------------------------------


def apply_to_cohort(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Call an autograd function once for all clients, from inside ``vmap``.

    Args:
        function: it takes the arguments with the client axis in front; tensors that all clients share
            are expanded, not copied.
        args: the arguments of one client.

    Returns:
        The outputs of one client.
    """
    return _CohortCall.apply(function, *args)


class _CohortCall(torch.autograd.Function):
    """Function with a rule for ``vmap`` that calls another function with the tensors of all clients."""

    @staticmethod
    def forward(function: type[torch.autograd.Function], *args: Any) -> Any:
        raise AssertionError("kernels run under vmap only")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save nothing: the rule below replaces this function before autograd differentiates it."""

    @staticmethod
    def vmap(info: Any, axes: Any, function: Any, *args: Any) -> tuple[Any, Any]:
        stacks = (clients_at(a, axis, info.batch_size) for a, axis in zip(args, axes[1:], strict=True))
        outputs = function.apply(*stacks)
        return outputs, 0 if isinstance(outputs, Tensor) else (0,) * len(outputs)


def contiguous_per_client(value: Tensor) -> Tensor:
    """Return a stack whose tensors are contiguous for each client. A tensor that all share is not copied."""
    return value if value[0].is_contiguous() else value.contiguous()


# Triton --------------------------------------------------------------------------------------------------


def accumulator_types(x: Tensor) -> tuple[torch.dtype, tl.dtype]:
    """Return the type of sums over a tensor, for torch and for Triton: float64 or float32."""
    return (torch.float64, tl.float64) if x.dtype == torch.float64 else (torch.float32, tl.float32)


def tile_shape(planes: int, pixels: int, size: int) -> tuple[int, int, tuple[int, int]]:
    """Return the tile of a program over ``planes x pixels`` values.

    Args:
        planes: number of planes (a plane is one channel of one image).
        pixels: values of a plane.
        size: number of values of a tile, a power of two.

    Returns:
        Planes and pixels of a tile, powers of two, and the number of tiles along both axes.
    """
    tile_pixels = min(triton.next_power_of_2(pixels), size)
    tile_planes = min(triton.next_power_of_2(planes), size // tile_pixels)
    return tile_planes, tile_pixels, (triton.cdiv(planes, tile_planes), triton.cdiv(pixels, tile_pixels))


@triton.jit
def relu(value, RELU6: tl.constexpr):
    """Return ``max(value, 0)``, for RELU6 at most 6; NaN for NaN."""
    value = tl.where(value <= 0.0, 0.0, value)
    if RELU6:
        value = tl.where(value >= 6.0, 6.0, value)
    return value


@triton.jit
def relu_is_flat(value, RELU6: tl.constexpr):
    """Return where the gradient of a ReLU is 0. At NaN it is 1."""
    flat = value <= 0.0
    if RELU6:
        flat = flat | (value >= 6.0)
    return flat


def tensor_or(tensor: Tensor | None, unused: Tensor) -> Tensor:
    """Return a tensor, or another one as the value of a kernel argument that the kernel does not read."""
    return unused if tensor is None else tensor
