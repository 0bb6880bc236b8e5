"""How long a run will take, before it begins: a few steps of its first cohort are timed and thrown away."""

from __future__ import annotations

import time
import warnings

from fedloom import rng, server
from fedloom.engines import Engine, LoopEngine
from fedloom.engines.choice import planned_steps, step_flops
from fedloom.engines.vectorised import VectorisedEngine
from fedloom.engines.workers import WorkersEngine
from fedloom.errors import FedloomError
from fedloom.run import Run, synchronise

WORTH = {"cpu": 2e12, "cuda": 1e15}
"""Arithmetic of the clients in a run from which on it may be long, so that a probe is worth its time; by kind of device."""
STEPS = 40_000
"""Steps of clients in a run from which on it may be long, however small they are."""
FEW = 4
"""Clients whose steps are timed where clients work one after another."""


def may_be_long(run: Run) -> bool:
    """Whether a run has enough to do for an estimate to be of use; without a clock."""
    steps = planned_steps(run) * run.size
    rows = max(run.roster.rows)
    batch = rows if run.work.batch_size == "full" else min(rows, int(run.work.batch_size))
    device = next(iter(run.state.leaves.values())).device.type
    return steps >= STEPS or steps * step_flops(run.bound.structure, batch) >= WORTH.get(device, WORTH["cpu"])


def round_seconds(run: Run) -> float | None:
    """Seconds that a round's clients will take, about; None where they cannot be timed.

    The first cohort makes one step, then two and four of its steps; a round is the fixed part and as many steps as its longest client
    makes. The run is not changed: the engine that is timed is one of its own, and what clients return is dropped.
    """
    try:
        with warnings.catch_warnings(), rng.torch_generator():
            warnings.simplefilter("ignore")
            return _timed(run)
    except FedloomError:
        return None  # the run itself says what is wrong


def _timed(run: Run) -> float:
    engine, at_once = _like(getattr(run.engine, "inner", run.engine))
    ids = list(run.drawn(1).ids)
    some = ids if at_once is None else sorted(ids, key=lambda i: -len(run.sites[i].train))[:FEW]
    bound = run.at(1)
    _, sent = server.dispatch(bound, run.state, run.cohort(ids, 1))
    rounds = max(1, run.work.rounds or 1)
    steps = max(1, planned_steps(run) // rounds)

    def spent(share: float) -> float:
        people = [run.participant(i, sent, share) for i in some]
        synchronise(run)
        begun = time.perf_counter()
        engine.run_cohort(bound, run.work, bound.method.schedule.round, sent.post, people)
        synchronise(run)
        return time.perf_counter() - begun

    counts = sorted({min(k, steps) for k in (1, 2, 4)})
    shares = [(k - 0.5) / steps for k in counts]
    spent(shares[0])  # what is made once is not counted
    times = [spent(share) for share in shares]
    each = max(0.0, times[-1] - times[0]) / (counts[-1] - counts[0]) if len(counts) > 1 else 0.0
    whole = times[0] + (steps - counts[0]) * each
    return whole if at_once is None else whole * len(ids) / len(some) / max(1, at_once)


def _like(engine: Engine) -> tuple[Engine, int | None]:
    """An engine that works as another does, and how many clients it takes at once; None for all of them."""
    if isinstance(engine, VectorisedEngine):
        step = "mapped" if engine.step == "compiled" else engine.step  # compiling takes longer than it may
        return VectorisedEngine(step=step, wave=engine.wave, unpadded=engine.unpadded), None
    if isinstance(engine, WorkersEngine):
        return LoopEngine(single=True), engine.count
    return LoopEngine(single=getattr(engine, "single", False)), 1


def in_words(seconds: float) -> str:
    """A span of time in words.

    Example:
        >>> in_words(90), in_words(5000), in_words(200000)
        ('2 min', '1.4 h', '2.3 days')
    """
    if seconds < 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 86400 else f"{seconds / 86400:.1f} days"
