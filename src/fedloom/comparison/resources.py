"""How many cells can be played at once: by processors, and by memory."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from fedloom import devices
from fedloom.comparison.arguments import federation
from fedloom.errors import UserError
from fedloom.runs.config_file import federation_of

PROCESS = 1.0e9
"""Bytes of a process that has torch loaded and trains a small network."""

COPIES = 4
"""Copies of the rows that a run may hold at once: as read, dealt out, on the device, stacked."""


def jobs_of(given: int | str, cells: int, made: Mapping[str, Any] | None) -> int:
    """The number of processes.

    Args:
        given: a number, or ``"auto"``.
        cells: cells to be played.
        made: arguments of one of them; None where there is none.
    """
    if isinstance(given, str) and given.isdigit():
        given = int(given)
    if given != "auto" and (not isinstance(given, int) or isinstance(given, bool) or given < 1):
        raise UserError(f"jobs={given!r}: expected a number of at least 1, or 'auto'")
    if cells < 2 or made is None:
        return 1
    if given != "auto":
        return min(int(given), cells)
    device = str(made.get("device", "auto"))
    if device.startswith("cuda") or (device == "auto" and devices.gpu_name() is not None):
        return 1  # a GPU is kept busy by one run; two fight over its memory
    most = min(cells, processors())
    if most < 2:
        return 1
    return max(1, min(most, int(free_memory() // (PROCESS + COPIES * rows_bytes(made)))))


def processors() -> int:
    """Processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def rows_bytes(made: Mapping[str, Any]) -> int:
    """Bytes of a cell's rows; its data are made once for that, which also finds mistakes early."""
    data, _ = federation_of(federation(made), int(made["seed"]))
    return sum(_bytes(part.x) + _bytes(part.y) for client in data for part in client.parts().values())


def _bytes(x: Any) -> int:
    if isinstance(x, Tensor):
        return x.numel() * x.element_size()
    return sum(_bytes(v) for v in (x.values() if isinstance(x, Mapping) else x))


def free_memory() -> float:
    """Bytes that can still be had: of the machine, and of the control group this process is in."""
    found = [float("inf")]
    try:
        text = Path("/proc/meminfo").read_text()
        line = re.search(r"MemAvailable:\s+(\d+) kB", text)
        found.append(float(line[1]) * 1024 if line else float("inf"))
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        if limit != "max":
            found.append(float(limit) - float(Path("/sys/fs/cgroup/memory.current").read_text()))
    except (OSError, ValueError):
        pass  # another system: processors alone decide
    return min(found)
