"""The parts of the training loss, one by one."""

from __future__ import annotations

import torch

from fedloom.clients.runner import ClientRunner
from fedloom.data.rows import map_inputs
from fedloom.network.bound_method import BoundPhase
from fedloom.rounds import server
from fedloom.rounds.diagnostics.tap_information import informed
from fedloom.rounds.run import Run
from fedloom.spec.parts import Phase, Receive, Sweep
from fedloom.spec.view import View
from fedloom.tasks.batch import Batch

CLIENTS = 3
"""Clients on whose rows terms are measured, evenly chosen."""


def term_values(run: Run) -> dict[str, float]:
    """The mean value of each term of the objective over a few clients, on one batch of each, before it trains.

    A client stands where its next round would begin: it has received the model and made the sweeps that come first. The model
    is in evaluation mode, and nothing that happens here is kept.

    Args:
        run: a run between two rounds.

    Returns:
        Values by owner, with the tapped module where the term reads one: ``{"task": ..., "isr.1 body.block1.act": ...}``. Empty
        where the objective has a single term, which is the training loss itself. Terms that carry a state from step to step
        are left out.
    """
    bound = run.at(run.state.round + 1)
    steps = bound.method.schedule.round
    at = next((i for i, step in enumerate(steps) if isinstance(step, Phase)), None)
    if at is None:
        return {}
    first = steps[at]
    assert isinstance(first, Phase)
    phase = bound.phases[first.name]
    if len(phase.terms) < 2:
        return {}
    names = _few(run)
    _, sent = server.dispatch(bound, run.state, run.cohort(names, run.state.round + 1))
    program = tuple(s for s in steps[:at] if isinstance(s, (Receive, Sweep)))
    totals: dict[str, list[float]] = {}
    for name in names:
        desk = ClientRunner(bound, run.work, sent.post, [run.participant(name, sent)])
        desk.run(program)
        for key, value in _values(desk, phase).items():
            totals.setdefault(key, []).append(value)
    return {key: sum(values) / len(values) for key, values in totals.items()}


def information_bounds(run: Run) -> dict[str, float]:
    """Per supervised tap ``H(Y) - MI_m`` in nats, the mean over a few clients on all their training rows.

    Args:
        run: a run between two rounds.

    Returns:
        Bounds by module; empty where the method has no adapters.
    """
    found: dict[str, list[float]] = {}
    for told in informed(run, _few(run)):
        found.setdefault(told.tap, []).append(told.bound)
    return {tap: sum(values) / len(values) for tap, values in found.items()}


def _few(run: Run) -> list[str]:
    """The clients on whose rows terms are measured."""
    ids = list(run.sites)
    return [ids[i] for i in sorted({round(i * (len(ids) - 1) / max(1, CLIENTS - 1)) for i in range(CLIENTS)})]


def _values(desk: ClientRunner, bound_phase: BoundPhase) -> dict[str, float]:
    """Of one client."""
    bound, phase, rows = desk.bound, bound_phase.phase, desk.participants[0].site.train
    size = desk.work.batch_size
    some = slice(0, len(rows) if isinstance(size, str) else size)
    x = map_inputs(lambda part: part[some], rows.x)
    batch = Batch(x, rows.y[some])
    seen = desk.inputs.seen(desk.inputs.own)
    leaves = desk.leaves if phase.view is None else {**desk.leaves, **phase.view(desk.leaves, seen)}
    trained = tuple(bound.specs[n].local for n in bound_phase.trained)
    view = View(bound, leaves, batch, seen, copy=phase.copy, taps=bound_phase.taps, trained=trained)
    found: dict[str, float] = {}
    with torch.no_grad():
        for term in bound_phase.terms:
            if term.carry is None:
                taps = [t if isinstance(t, str) else t.name for t in bound_phase.taps.get(term.owner, ()) if t != "z"]
                key = term.owner if len(taps) != 1 else f"{term.owner} {taps[0]}"
                found[key] = found.get(key, 0.0) + float(term.fn(view, batch, seen))
    return found
