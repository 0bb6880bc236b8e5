"""The choice of the engine, once before round one. Neither clocks nor free memory change it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
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


def choose_plan(structure: Structure, device: str, cohort: int, rows: int, steps: int, cpus: int) -> EnginePlan:
    """Choose the plan of ``engine="auto"``. Depends on the arguments only.

    Args:
        structure: the structure of the model.
        device: kind of device, for example ``"cuda"``.
        cohort: clients in a round.
        rows: rows of a batch.
        steps: steps of the longest client in the whole run.
        cpus: number of CPUs.
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


def choose_engine(
    run: Run,
    engine: str | Engine = "auto",
    *,
    workers: int = 0,
    head: str | None = None,
    saved: Mapping[str, Any] | None = None,
) -> tuple[Engine, EnginePlan]:
    """Choose the engine of a run and the plan for its record.

    The second of the two steps of construction, after
    :func:`fedloom.engines.choose_device.choose_device`. It needs the network: it counts the
    network's operations, and the probe trains a few rows on the loop engine and on the vectorised
    engine and compares them. If the probe fails, or a later step of the vectorised engine, then the
    loop engine runs the same network. It is never rebuilt: for one client, the layers that replace
    torch's compute what torch's layers compute.

    Args:
        run: a run before round one.
        engine: ``"auto"``, ``"loop"``, ``"vectorised"``, ``"flower"``, or an engine, which is used.
        workers: processes of the loop engine; 0: none, or with ``"auto"`` the number of the plan.
        head: the pattern of the head's leaves that the user passed.
        saved: the recorded plan of a run that resumes, which is used again.

    Returns:
        The engine and the plan.

    Raises:
        NotVectorisable: the user named ``"vectorised"``, and the model or the method does not
            support it.
    """
    if not isinstance(engine, str):
        return engine, EnginePlan(engine="loop", why=f"an engine of one's own: {getattr(engine, 'name', '')}")
    if engine not in ("auto", "loop", "vectorised", "flower"):
        raise UserError(f"engine={engine!r}: expected auto, loop, vectorised or flower")
    if engine == "flower":
        why = "every client a site in this process, through Flower's messages"
        return load("flower").LocalEngine(), EnginePlan(engine="loop", why=why)
    strict = engine == "vectorised"
    if saved is not None:
        plan = EnginePlan(**saved)
        return _build_engine(run, plan, head, strict=strict), plan
    if workers and strict:
        raise UserError(f"workers={workers} is an option of engine='loop'; the vectorised engine has none")
    device = devices.device_kind(run.bound.network.device.torch_device)
    if workers and device != "cpu":
        raise UserError(f"workers={workers}: worker processes compute on the CPU; use device='cpu' or workers=0")
    rows = max(run.roster.rows)
    batch = rows if run.work.batch_size == "full" else min(rows, int(run.work.batch_size))
    if engine == "auto" and not workers:
        steps = planned_steps(run)
        plan = choose_plan(run.bound.structure, device, run.size, batch, steps, cpus_per_process())
    elif strict:
        plan = EnginePlan(engine="vectorised", why="asked for")
    else:
        plan = EnginePlan(engine="loop", workers=workers, single=workers > 0, why="asked for")
    if plan.engine == "vectorised":
        plan = _play_probe(run, plan, wave_size(run.bound, run.work, rows, device), strict=strict)
    return _build_engine(run, plan, head, strict=strict), plan


def _build_engine(run: Run, plan: EnginePlan, head: str | None, *, strict: bool) -> Engine:
    """Build the engine of a plan. ``strict``: raise an error where the loop engine would take over."""
    if plan.engine == "vectorised":
        otherwise = _refuse if strict else _take_over
        return VectorisedEngine(step=plan.step, wave=plan.halved or None, otherwise=otherwise)
    if plan.workers:
        return WorkersEngine(run, plan.workers, head=head)
    return LoopEngine(single=plan.single)


def _play_probe(run: Run, plan: EnginePlan, most: int, *, strict: bool) -> EnginePlan:
    """Return the plan with the size of its waves; that of the loop engine if the probe fails.

    Args:
        most: most clients of a wave.
        strict: whether a failure is an error: the user named ``"vectorised"``.
    """
    verdict = probe(run)
    if not verdict.possible:
        if strict:
            raise NotVectorisable(f"engine='vectorised': {verdict.why}; engine='loop' runs it")
        return EnginePlan(engine="loop", why=f"loop, because {verdict.why}")
    wave = min(run.size, most)
    step = "auto" if wave < run.size else plan.step
    why = "; ".join(w for w in (plan.why, verdict.why) if w)
    return EnginePlan(engine="vectorised", step=step, wave=wave, why=why)


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


def cpus_per_process() -> int:
    """Return FEDLOOM_CPUS or the CPU count, divided by the number of torchrun processes."""
    setting, ranks = os.environ.get("FEDLOOM_CPUS", ""), os.environ.get("LOCAL_WORLD_SIZE", "")
    count = int(setting) if setting.isdigit() else os.cpu_count() or 1
    return max(1, count // max(1, int(ranks) if ranks.isdigit() else 1))
