"""Who waits for whom on one GPU: per method seconds a round, how long the host waits for the device, kernels and pauses.

    python benchmarks/timeline.py                                     # the methods of the tables
    python benchmarks/timeline.py --methods fedaims "fedavg + isr" --kernels 40

PFLlib's CNN as in ``gpu.py``. The first run of a method is timed; a second one is profiled for some rounds, which slows the host down: of
it kernels, launches and pauses are shown, pauses as spans in which the device has nothing to do.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from gpu import fitted, pictures
from torch.profiler import ProfilerActivity, profile

import fedloom as fl
from fedloom.clients import states
from fedloom.rounds import server

Clients = Sequence[tuple[Any, Any]]
METHODS = ("fedavg", "scaffold", "fedmap", "fedavg + lag(k=2)", "fedavg + isr", "fedavg + isr + lag(k=2)", "fedaims")
PROFILED = 4
"""Rounds under the profiler."""
PAUSE = 15.0
"""Microseconds without a kernel that count as a pause."""


def run(method: str, data: Clients, rounds: int, after: Callable[[dict[str, Any]], None]) -> None:
    """One run; ``after`` is told the record of each round."""
    fitted(method, fl.models.pfllib_cnn, data, 10, 64, False, "fp32", rounds=rounds, callbacks=[after])


def timed(method: str, data: Clients, rounds: int = 30) -> tuple[float, float]:
    """Milliseconds of a round, and of the host's waiting in it; medians from the fourth round on."""
    waiting, found = [0.0], list[tuple[float, float]]()
    confirm = server.confirm

    def waited(pending: server.PendingRound) -> tuple[states.ServerState, server.Outcome]:
        begun = time.perf_counter()
        value = confirm(pending)
        waiting[0] += time.perf_counter() - begun
        return value

    def after(record: dict[str, Any]) -> None:
        found.append((record["seconds"], waiting[0]))
        waiting[0] = 0.0

    server.confirm = waited
    try:
        run(method, data, rounds, after)
    finally:
        server.confirm = confirm
    seconds, waits = zip(*found[3:], strict=True)
    return 1e3 * statistics.median(seconds), 1e3 * statistics.median(waits)


def profiled(method: str, data: Clients, first: int = 10) -> list[Any]:
    """What the device did in some rounds, in order."""
    watch = profile(activities=[ProfilerActivity.CUDA])

    def after(record: dict[str, Any]) -> None:
        if record["round"] in (first, first + PROFILED):
            torch.cuda.synchronize()
            watch.start() if record["round"] == first else watch.stop()

    run(method, data, first + PROFILED + 2, after)
    events = [e for e in watch.events() or () if e.device_type == torch.autograd.DeviceType.CUDA]
    return sorted(events, key=lambda e: e.time_range.start)


def pauses(events: Sequence[Any]) -> tuple[float, list[float]]:
    """Microseconds in which the device is busy, and its pauses."""
    busy, end, found = 0.0, float("-inf"), list[float]()
    for event in events:
        start, stop = event.time_range.start, event.time_range.end
        if end > float("-inf") and start - end > PAUSE:
            found.append(start - end)
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return busy, found


def main() -> None:
    """Measures and shows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--kernels", type=int, default=0, help="how many kernels of each method to list, longest first")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: nothing to measure")
        return
    data = pictures([500] * 100)
    print(
        "| method | ms a round | host waits | kernels | launches | pauses | longest pause |\n|---|---|---|---|---|---|---|"
    )
    for method in options.methods:
        (round_, waits), events = timed(method, data), profiled(method, data)
        busy, found = pauses(events)
        cells = [f"{v:.2f}" for v in (round_, waits, busy / PROFILED / 1e3)] + [f"{len(events) / PROFILED:.0f}"]
        cells += [f"{sum(found) / PROFILED / 1e3:.2f}", f"{max(found, default=0.0) / 1e3:.2f}"]
        print(f"| {method} | " + " | ".join(cells) + " |", flush=True)
        spent: Counter[str] = Counter()
        for event in events:
            spent[event.name] += event.time_range.end - event.time_range.start
        for name, total in spent.most_common(options.kernels):
            print(f"    {total / PROFILED:9.1f} us a round  {name[:120]}")


if __name__ == "__main__":
    main()
