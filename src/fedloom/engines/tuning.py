"""``tune``: measures the ways in which a run could be made, where the rule of ``engine="auto"`` is not to be trusted."""

from __future__ import annotations

import os
import statistics
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from fedloom.engines.vectorised.engine import VectorisedEngine
from fedloom.errors import NotVectorisable

Fit = Callable[..., Any]


def tune(fit: Fit, *args: Any, rounds: int = 3, compiled: bool = False, **options: Any) -> dict[str, Any]:
    """Runs a few rounds in each way and tells which is fastest.

    Args:
        fit: ``fl.fit``, or anything that takes ``engine``, ``workers``, ``rounds`` and has a ``history`` in its result.
        *args: its positional arguments.
        rounds: timed rounds of each way; the first round of each comes on top and is left out.
        compiled: also try compiled steps, which takes up to a minute.
        **options: its other options.

    Returns:
        ``engine`` and ``workers`` for the configuration, ``step`` for the vectorised engine, and ``seconds``: the median
        round of every way that could be tried.
    """
    ways: dict[str, Mapping[str, Any]] = {
        "loop": {"engine": "loop", "workers": 0},
        "vectorised": {"engine": "vectorised", "workers": 0},
    }
    if compiled:
        ways["compiled"] = {"engine": VectorisedEngine(step="compiled"), "workers": 0}
    cpus = os.cpu_count() or 1
    if cpus > 1:
        ways[f"workers {cpus}"] = {"engine": "loop", "workers": cpus}
    quiet = {"progress": False, "evaluate": {"every": 0}}
    seconds: dict[str, float] = {}
    for name, way in ways.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                result = fit(*args, **{**options, **quiet, **way, "rounds": rounds + 1})
            except NotVectorisable:
                continue
        seconds[name] = statistics.median(r["seconds"] for r in result.history[1:])
    best = min(seconds, key=lambda name: seconds[name])
    chosen = ways[best]
    engine = chosen["engine"] if isinstance(chosen["engine"], str) else "vectorised"
    step = "compiled" if best == "compiled" else "auto"
    return {"engine": engine, "workers": chosen["workers"], "step": step, "seconds": seconds}
