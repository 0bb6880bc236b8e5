"""Evaluation of clients that never took part in the run."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

import torch

from fedloom import rng
from fedloom.clients.messages import Participant, Post, Site
from fedloom.clients.runner import ClientRunner
from fedloom.clients.states import ClientState
from fedloom.data import Federation
from fedloom.errors import RunError, UserError
from fedloom.network.bound_method import Bound, BoundPhase
from fedloom.rounds import evaluation, server
from fedloom.rounds.run import Run
from fedloom.spec.parts import Judge, Phase, Program, Send, Step
from fedloom.tasks.base import Metrics


def held_out(data: Federation, share: float, seed: int) -> tuple[str, ...]:
    """Draw the clients that do not take part: ``floor(share N + 0.5)``, by seed, in federation order."""
    if not share:
        return ()
    count = math.floor(share * len(data) + 0.5)
    if not 1 <= count < len(data):
        raise UserError(
            f"holdout={share}: of {len(data)} clients {count} would be new; expected at least one on each side"
        )
    chosen = rng.stream(seed, "sample", "holdout").choice(len(data), size=count, replace=False)
    return tuple(data.ids[i] for i in sorted(chosen))


def judge(run: Run, sites: Mapping[str, Site], epochs: int) -> dict[str, Metrics]:
    """Return the metrics of new clients on their test rows, after they trained their own leaves.

    New clients start like any client in its first round: the setup program, then the server's message. They train the
    leaves that the method lets them keep, and the method's rule for evaluation tests them. Shared leaves do not change.

    Args:
        run: a run after its last round.
        sites: the new clients.
        epochs: passes over their training rows.
    """
    tested = {n: site for n, site in sites.items() if site.test is not None}
    if not tested:
        return {}
    worker, program, post, people = _prepared(run, tested, epochs)
    replies = run.engine.run_cohort(worker, run.work, program, post, people)
    sizes = {n: len(rows) for n, site in tested.items() if (rows := site.test) is not None}
    return evaluation.own_metrics(worker.task, replies, sizes)


def desks(run: Run, names: Iterable[str]) -> Iterator[ClientRunner]:
    """Yield the runners of new clients after their adaptation: their own models, ready for use."""
    sites = {n: run.new[n] for n in names}
    if not sites:
        return
    worker, program, post, people = _prepared(run, sites, run.adapt_epochs)
    for person in people:
        desk = ClientRunner(worker, run.work, post, [person])
        with torch.inference_mode(False), torch.enable_grad():
            desk.run(tuple(step for step in program if not isinstance(step, Judge)))
        yield desk


def _prepared(run: Run, sites: Mapping[str, Site], epochs: int) -> tuple[Bound, Program, Post, list[Participant]]:
    """Return the bound method, the program, the message and the tasks of new clients.

    Raises:
        RunError: the setup of a client gave a reply that is malformed or not finite.
    """
    names = list(sites)
    bound = run.at(run.state.round)
    cohort = replace(run.cohort([], run.state.round), ids=tuple(names), rows=tuple(len(sites[n].train) for n in names))
    states = dict.fromkeys(names, ClientState())
    setup = bound.method.schedule.setup
    if setup and bound.method.schedule.setup_by == "all":
        people = [Participant(sites[n], states[n]) for n in names]
        post = server.post(bound, run.state, replace(cohort, round=0), {})
        replies = run.engine.run_cohort(bound, run.work, setup, post, people)
        outcome = server.check_replies(bound, replies, "setup")
        if outcome.rejected:
            raise RunError(f"setup of new clients: a reply cannot be used ({outcome.reasons})")
        states = {r.id: replace(r.state, rounds=0) for r in outcome.accepted}
    state, sent = server.dispatch(bound, run.state, cohort)
    post = server.post(bound, state, cohort, sent.post.broadcast, tested=True)
    program, worker = personal_program(bound, epochs, server.personal_leaves(bound, run.state))
    people = [Participant(sites[n], states[n], dict(sent.addressed[n]), sent.keys.get(n)) for n in names]
    return worker, program, post, people


def personal_program(bound: Bound, epochs: int, personal: Collection[str] = ()) -> tuple[Program, Bound]:
    """Return a round's program that trains only kept leaves, with the adapt program and a test at its end.

    Args:
        bound: the method.
        epochs: passes of each phase.
        personal: gated leaves that are personal.

    Returns:
        The program, and the bound method with its phases.
    """
    steps: list[Step] = []
    phases: dict[str, BoundPhase] = dict(bound.phases)
    schedule = bound.method.schedule
    for step in schedule.round:
        if isinstance(step, Phase):
            trained = bound.phases[step.name].trained
            own = tuple(n for n in trained if bound.specs[n].kept and (not bound.specs[n].gated or n in personal))
            if own and epochs:
                name = f"new {step.name}"
                phase = replace(step, name=name, epochs=epochs, steps=None)
                old = bound.phases[step.name]
                groups = tuple((kept, o) for names, o in old.groups if (kept := tuple(n for n in names if n in own)))
                phases[name] = replace(old, phase=phase, trained=own, groups=groups)
                steps.append(phase)
        elif not isinstance(step, Send):
            steps.append(step)
    return (*steps, *schedule.adapt[1:], Judge()), replace(bound, phases=phases)
