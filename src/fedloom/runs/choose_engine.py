"""Which engine runs, how wide and how compiled: resolved once before round one, never by a clock or by free memory."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from fedloom import devices
from fedloom.engines.base import Engine
from fedloom.engines.load import load
from fedloom.engines.loop import LoopEngine
from fedloom.engines.processes import WorkersEngine
from fedloom.engines.vectorised.engine import VectorisedEngine
from fedloom.engines.vectorised.waves import wave_size
from fedloom.errors import NotVectorisable, UserError
from fedloom.runs.probe import probe, said
from fedloom.spec.structure import Structure

if TYPE_CHECKING:
    from fedloom.rounds.run import Run


def make_engine(name: str | Engine) -> Engine:
    """The engine of a name; an engine is returned as it is."""
    if not isinstance(name, str):
        return name
    if name == "vectorised":
        return VectorisedEngine()
    if name not in ("auto", "loop"):
        raise UserError(f"engine={name!r}: expected auto, loop or vectorised")
    return LoopEngine()


DENSE_FLOPS = 2e7
"""Arithmetic of one client's step up to which clients gain from being stepped together on a CPU."""
LEAST_STEPS = 400
"""Client steps of a run below which nothing but the plain loop pays."""
COMPILE_STEPS = 12_000
"""Steps of a wave in a run from which on compiling pays (it takes about ten seconds once, and saves 0.75 milliseconds a step)."""
WORKER_FLOPS = 5e11
"""Arithmetic of a run from which on worker processes pay (they take a few seconds to start)."""
_SERIAL = ("Conv", "LSTM", "GRU", "RNN", "Attention", "Transformer")


@dataclass(frozen=True, kw_only=True, slots=True)
class EnginePlan:
    """What was resolved, for the run's record.

    Args:
        engine: ``"loop"`` or ``"vectorised"``.
        workers: processes of the loop engine; 0 for none.
        step: how the vectorised engine makes its steps.
        wave: most clients side by side; 0 where that does not apply.
        single: whether the loop engine computes with one thread, so that the number of workers changes nothing.
        halved: most clients side by side since memory ran out; 0 where it never did.
        why: one line.
    """

    engine: Literal["loop", "vectorised"]
    workers: int = 0
    step: Literal["auto", "mapped", "traced", "compiled"] = "auto"
    wave: int = 0
    single: bool = False
    halved: int = 0
    why: str = ""

    def record(self) -> dict[str, Any]:
        """As a table of plain values."""
        return asdict(self)


def step_flops(structure: Structure, rows: int) -> float:
    """Floating-point operations of one client's step: twice the multiplications of the forward pass, three times over."""
    shapes = {call.name: call.shape for call in structure.calls}
    total = 0.0
    for leaf in structure.leaves:
        if leaf.buffer or len(leaf.shape) < 2 or leaf.module not in shapes:
            continue
        outputs = shapes[leaf.module][1:].numel()
        total += leaf.shape.numel() * max(1, outputs // max(1, leaf.shape[0]))
    return 6.0 * rows * total


def choose(structure: Structure, device: str, cohort: int, rows: int, steps: int, cpus: int) -> EnginePlan:
    """The plan of ``engine="auto"``: a pure function of its arguments.

    Args:
        structure: the model's.
        device: kind of device.
        cohort: clients in a round.
        rows: rows of a batch.
        steps: steps of the longest client in the whole run.
        cpus: processors.
    """
    if device == "cuda":
        why = "many clients at once" if cohort > 1 else "captured steps"
        return EnginePlan(engine="vectorised", why=f"a GPU is busy only with {why}")
    if cohort < 2:
        return EnginePlan(engine="loop", why="one client at a time")
    flops = step_flops(structure, rows)
    serial = [c.kind for c in structure.calls if any(word in c.kind for word in _SERIAL)]
    if not serial and flops <= DENSE_FLOPS:
        if steps * cohort < LEAST_STEPS:
            return EnginePlan(engine="loop", why=f"{steps * cohort} steps in all: nothing else pays")
        kind: Literal["auto", "compiled"] = "compiled" if steps >= COMPILE_STEPS else "auto"
        return EnginePlan(engine="vectorised", step=kind, why=f"small dense network ({flops:.1g} operations a step)")
    if cpus > 1 and flops * steps * cohort >= WORKER_FLOPS:
        what = f"{serial[0]} layers" if serial else f"{flops:.1g} operations a step"
        return EnginePlan(
            engine="loop", workers=min(cpus, cohort), single=True, why=f"{what}: one process per processor"
        )
    return EnginePlan(engine="loop", why="the network is large or has convolutions, the run is short")


def planned_steps(run: Run) -> int:
    """Steps of the longest client in the whole run, whatever its phases."""
    work, rounds = run.work, run.work.rounds or 1
    rows = max(run.roster.rows)
    batch = rows if work.batch_size == "full" else int(work.batch_size)
    total = 0
    for phase in run.bound.method.phases("round"):
        passes = work.epochs if phase.epochs is None else phase.epochs
        total += phase.steps if phase.steps is not None else passes * -(-rows // batch)
    return rounds * max(1, total)


def resolve(
    run: Run,
    engine: str | Engine = "auto",
    *,
    workers: int = 0,
    head: str | None = None,
    saved: Mapping[str, Any] | None = None,
) -> tuple[Engine, EnginePlan]:
    """The engine of a run, and the plan to be recorded.

    Args:
        run: a run before round one.
        engine: ``"auto"``, ``"loop"``, ``"vectorised"``, ``"flower"``, or an engine, which is returned as it is.
        workers: processes of the loop engine; 0 for none (or, with ``"auto"``, for the rule's number).
        head: the pattern of the head's leaves that the run was given.
        saved: the record of the plan of a run that goes on, which is then used as it is.

    Raises:
        NotVectorisable: ``"vectorised"`` was asked for by name, and the model or the method cannot be.
    """
    if not isinstance(engine, str):
        return engine, EnginePlan(engine="loop", why=f"an engine of one's own: {getattr(engine, 'name', '')}")
    if engine not in ("auto", "loop", "vectorised", "flower"):
        raise UserError(f"engine={engine!r}: expected auto, loop, vectorised or flower")
    if engine == "flower":
        why = "every client a site in this process, through Flower's messages"
        return load("flower").LocalEngine(), EnginePlan(engine="loop", why=why)
    if saved is not None:
        return _again(run, EnginePlan(**saved), head, asked=engine == "vectorised")
    if workers and engine == "vectorised":
        raise UserError(f"workers={workers} is an option of engine='loop'; the vectorised engine has none")
    device = devices.device_kind(next(iter(run.state.leaves.values())).device)
    if workers and device != "cpu":
        raise UserError(f"workers={workers}: worker processes compute on the CPU; use device='cpu' or workers=0")
    rows = max(run.roster.rows)
    batch = rows if run.work.batch_size == "full" else min(rows, int(run.work.batch_size))
    if engine == "auto" and not workers:
        plan = choose(run.bound.structure, device, run.size, batch, planned_steps(run), processors())
    elif engine == "vectorised":
        plan = EnginePlan(engine="vectorised", why="asked for")
    else:
        plan = EnginePlan(engine="loop", workers=workers, single=workers > 0, why="asked for")
    if plan.engine == "vectorised":
        return _vectorised(run, plan, rows, device, asked=engine == "vectorised")
    if plan.workers:
        return WorkersEngine(run, plan.workers, head=head), plan
    return LoopEngine(single=plan.single), plan


def _again(run: Run, plan: EnginePlan, head: str | None, *, asked: bool) -> tuple[Engine, EnginePlan]:
    """The engine of a plan that was resolved before."""
    if plan.engine == "vectorised":
        wave, otherwise = plan.halved or None, _refuse if asked else _take_over
        return VectorisedEngine(step=plan.step, wave=wave, otherwise=otherwise), plan
    return (WorkersEngine(run, plan.workers, head=head) if plan.workers else LoopEngine(single=plan.single)), plan


def _vectorised(run: Run, plan: EnginePlan, rows: int, device: str, *, asked: bool) -> tuple[Engine, EnginePlan]:
    verdict = probe(run)
    if not verdict.possible:
        if asked:
            raise NotVectorisable(f"engine='vectorised': {verdict.why}; engine='loop' runs it")
        return LoopEngine(), EnginePlan(engine="loop", why=f"loop, because {verdict.why}")
    wave = min(run.size, wave_size(run.bound, run.work, rows, device))
    why = "; ".join(w for w in (plan.why, verdict.why) if w)
    step = "auto" if wave < run.size else plan.step
    plan = EnginePlan(engine="vectorised", step=step, wave=wave, why=why)
    otherwise = _refuse if asked else _take_over
    return VectorisedEngine(step=step, otherwise=otherwise), plan


def _refuse(error: Exception) -> tuple[Engine, str]:
    """Clients of a run that asked for the vectorised engine cannot be run side by side, though the probe could."""
    raise NotVectorisable(
        f"engine='vectorised': {said(error)}; use engine='auto' or 'loop', which run clients one after another"
    ) from error


def _take_over(error: Exception) -> tuple[Engine, str]:
    """The loop goes on where the rule chose to run clients side by side and that failed, though the probe did not."""
    why = f"loop, because {said(error)}"
    warnings.warn(f"clients run one after another from now on ({why})", stacklevel=2)
    return LoopEngine(), why


def processors() -> int:
    """Processors that a run may count on: FEDLOOM_CPUS where it is set, else the machine's, shared by torchrun's processes."""
    told, ranks = os.environ.get("FEDLOOM_CPUS", ""), os.environ.get("LOCAL_WORLD_SIZE", "")
    count = int(told) if told.isdigit() else os.cpu_count() or 1
    return max(1, count // max(1, int(ranks) if ranks.isdigit() else 1))


def names() -> Sequence[str]:
    """The engines that can be asked for by name."""
    return ("auto", "loop", "vectorised")
