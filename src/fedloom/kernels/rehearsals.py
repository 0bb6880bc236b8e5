"""Kernels are compiled side by side: what will run is gone through once before, in which none of them runs.

Triton compiles a kernel when it is first launched, one after another; a step of a small network has a dozen, of a second each. In a rehearsal each
launch only begins its compilation, and what a kernel would have written is zeros.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,import-untyped,import-not-found"

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from fedloom.kernels.cohort import INTERPRETED, present

THREADS = 16
"""Most kernels that are compiled at a time."""
_one_at_a_time = threading.Lock()


def rehearsed(go: Callable[[], object], there: Tensor) -> bool:
    """Goes through something whose results are of no use, and says whether it did: on CUDA only, where Triton can compile in threads.

    Nothing that is gone through may change what is used later. An error is left to whoever does the same in earnest.

    Args:
        go: what will be done.
        there: a tensor of the device.
    """
    if not there.is_cuda or INTERPRETED or not present(there):
        return False
    try:
        from triton import AsyncCompileMode
        from triton.runtime._async_compile import active_mode
        from triton.runtime.jit import JITFunction
    except ImportError:  # an older Triton
        return False
    if not _one_at_a_time.acquire(blocking=False):  # of several runs in threads
        return False
    with contextlib.ExitStack() as stack:
        stack.callback(_one_at_a_time.release)
        pool = stack.enter_context(ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)))
        mode = AsyncCompileMode(pool, ignore_errors=True)
        quiet = torch.random.fork_rng(devices=[there.device])  # a model may draw noise of its own
        with contextlib.suppress(Exception), quiet, mode, _not_run(JITFunction, active_mode, mode), _Zeros():
            go()
        kernels = [future.kernel for future in mode.future_kernels.values() if future.kernel is not None]
        # What starts a kernel is compiled too, when it is first asked for.
        list(pool.map(lambda kernel: _ready(kernel, there.device), kernels))
    return True


def _ready(kernel: Any, device: torch.device) -> None:
    with contextlib.suppress(Exception), torch.cuda.device(device):
        torch.cuda.current_stream(device).query()  # makes the device known to this thread
        kernel.run  # noqa: B018


@contextlib.contextmanager
def _not_run(jit: Any, active: Any, mode: Any) -> Iterator[None]:
    """Inside, launches of the rehearsal begin a compilation, in whichever thread: autograd has threads of its own, which it tells its modes."""
    plain = jit.run

    def begun(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if not any(isinstance(inside, _Zeros) for inside in _get_current_dispatch_mode_stack()):
            return plain(self, *args, grid=grid, warmup=warmup, **options)
        before = active.set(mode)
        try:
            return plain(self, *args, grid=grid, warmup=True, **options)
        finally:
            active.reset(before)

    jit.run = begun
    try:
        yield
    finally:
        jit.run = plain


class _Zeros(TorchDispatchMode):
    """Memory that nobody has written to holds zeros: of anything else somebody could make an index."""

    MADE = (
        torch.ops.aten.empty.memory_format,
        torch.ops.aten.empty_strided.default,
        torch.ops.aten.empty_like.default,
        torch.ops.aten.new_empty.default,
        torch.ops.aten.new_empty_strided.default,
    )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.zero_() if func in self.MADE else made
