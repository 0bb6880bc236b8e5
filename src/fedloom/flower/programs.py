"""The programs that a site can be asked for, by name, and what each may send."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from fedloom.clients import states
from fedloom.clients.messages import Participant, Reply, Site, Work
from fedloom.clients.runner import ClientRunner
from fedloom.clients.states import ClientState
from fedloom.data import Rows
from fedloom.errors import UserError
from fedloom.flower.error_codes import WORDS, Code, Refusal
from fedloom.network.bound_method import Bound
from fedloom.rounds import server
from fedloom.rounds.run import add_tests
from fedloom.spec.parts import Judge, Program, Receive
from fedloom.spec.seen import Cohort
from fedloom.tensors import Inputs, Leaves, Message

ROUND, SETUP, OWN, SHARED, VALIDATE = "round", "setup", "own", "shared", "validate"
LOST_STATE = WORDS[Code.STATE]
_MOMENTS = {"+before": ("before",), "+after": ("after",), "+before+after": ("before", "after")}


def programs(bound: Bound) -> dict[str, Program]:
    """Every program that a site can be asked for."""
    schedule = bound.method.schedule
    found: dict[str, Program] = {SETUP: schedule.setup, ROUND: schedule.round}
    found |= {ROUND + name: add_tests(schedule.round, moments) for name, moments in _MOMENTS.items()}
    found[OWN] = (*schedule.adapt, Judge())
    found[VALIDATE] = (*schedule.adapt, Judge(rows="val"))
    found[SHARED] = (Receive(plain=True), Judge(route=False))
    return found


def name_of(bound: Bound, program: Program) -> str:
    """The name of a program."""
    for name, known in programs(bound).items():
        if known is program or (known == program and known):
            return name
    raise UserError("the engine 'flower' cannot run this program; sites know setup, round and evaluation only")


def trains(program: str) -> bool:
    """Whether what a program leaves behind is kept."""
    return program == SETUP or program.startswith(ROUND)


def travelling(bound: Bound, leaves: Leaves) -> Leaves:
    """The leaves that are sent to a site: those that clients upload too, and any other that the server has changed.

    A site makes the rest itself: personal and frozen leaves begin where its own model begins.
    """
    return {
        name: value
        for name, value in leaves.items()
        if bound.specs[name].sent or (value is not bound.start[name] and not torch.equal(value, bound.start[name]))
    }


# What may leave -------------------------------------------------------------------------------------------

Declared = dict[str, dict[str, tuple[tuple[int, ...], str]]]
"""Shape and type of every tensor that leaves a site, by entry and name."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The form of a row: enough to run a program on rows that nobody has.

    Args:
        x: a few rows of zeros.
        y: their targets.
    """

    x: Inputs
    y: torch.Tensor

    @staticmethod
    def of(rows: Rows) -> Sample:
        """Zeros in the form of some rows."""
        x = rows.x
        made: Inputs
        if isinstance(x, torch.Tensor):
            made = torch.zeros(4, *x.shape[1:], dtype=x.dtype, device=x.device)
        elif isinstance(x, dict):
            made = {k: torch.zeros(4, *v.shape[1:], dtype=v.dtype, device=v.device) for k, v in x.items()}
        else:
            made = tuple(torch.zeros(4, *v.shape[1:], dtype=v.dtype, device=v.device) for v in x)
        return Sample(made, torch.zeros(4, *rows.y.shape[1:], dtype=rows.y.dtype, device=rows.y.device))

    def site(self, classes: int) -> Site:
        """A site that holds these rows."""
        labels = self.y.cpu().numpy() if self.y.dim() == 1 else np.zeros(len(self.y), np.int64)
        counts = torch.zeros(classes, device=self.y.device)
        if classes:
            counts[0] = len(self.y)
        rows = Rows(self.x, self.y)
        return Site("declaration", rows, rows, rows, labels, counts)


def declared(bound: Bound, work: Work, sample: Sample, program: str = ROUND) -> Declared:
    """What a program uploads, found by running it on rows of zeros: no real row has any part in it."""
    if not programs(bound)[program]:
        return {}
    width = max(bound.structure.outputs, 2) if bound.task.classes and sample.y.dim() == 1 else 0
    site, state, kept = sample.site(width), server.initial_state(bound), ClientState()
    if program != SETUP and bound.method.schedule.setup:
        desk = _rehearsed(bound, work, site, state, kept, SETUP)
        (reply,) = desk.replies()
        state, kept = server.aggregate(bound, state, [reply], _cohort(bound, work, site, 0), "setup"), reply.state
    desk = _rehearsed(bound, work, site, state, replace(kept, rounds=0), program)
    return {entry: {n: _form(v) for n, v in value.items()} for entry, value in desk.message.items()}


def _rehearsed(
    bound: Bound, work: Work, site: Site, state: states.ServerState, kept: ClientState, program: str
) -> ClientRunner:
    """The desk of a lone client after a program."""
    cohort = _cohort(bound, work, site, 0 if program == SETUP else 1)
    if program == SETUP:
        sent = server.setup_dispatch(bound, state, cohort)
    else:
        _, sent = server.dispatch(bound, state, cohort)
    person = Participant(site, kept, dict(sent.addressed[site.id]), sent.keys.get(site.id))
    desk = ClientRunner(bound, replace(work, epochs=1, batch_size=2), sent.post, [person])
    desk.run(programs(bound)[program])
    return desk


def _cohort(bound: Bound, work: Work, site: Site, round: int) -> Cohort:
    return Cohort(
        ids=(site.id,),
        rows=(len(site.train),),
        population=1,
        round=round,
        leaves=bound.start,
        lr=work.optimizer.lr_at(round, work.rounds),
        structure=bound.structure,
        seed=work.seed,
        order=(site.id,),
        rounds=work.rounds,
    )


def _form(value: torch.Tensor) -> tuple[tuple[int, ...], str]:
    return tuple(value.shape), str(value.dtype).removeprefix("torch.")


def undeclared(message: Message, allowed: Declared) -> str | None:
    """The first tensor that is not on the list, in words; None where all are."""
    for entry, value in message.items():
        if entry not in allowed:
            return f"the entry {entry!r} is not declared"
        for name, tensor in value.items():
            if name not in allowed[entry]:
                return f"{entry}[{name!r}] is not declared"
            if _form(tensor) != allowed[entry][name]:
                shape, kind = allowed[entry][name]
                got = f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
                return f"{entry}[{name!r}] is {got}, declared as {shape} {kind}"
    missing = next((f"{e}[{n!r}]" for e, names in allowed.items() for n in names if n not in message.get(e, {})), None)
    return None if missing is None else f"{missing} is missing"


def check_leaving(reply: Reply, allowed: Declared) -> None:
    """Refuses to send what is not declared, and to keep what is not finite. The server checks the message."""
    fault = undeclared(reply.message, allowed)
    if fault is not None:
        raise Refusal(Code.UNDECLARED, fault)
    fault = server.first_fault(replace(reply, message={}))
    if fault is not None:
        raise Refusal(Code.NOT_FINITE, fault)


def manifest(allowed: Declared) -> list[dict[str, Any]]:
    """The list in plain values, a line per tensor."""
    return [
        {"entry": entry, "name": name, "shape": list(shape), "type": kind, "bytes": _bytes(shape, kind)}
        for entry, names in allowed.items()
        for name, (shape, kind) in names.items()
    ]


def _bytes(shape: tuple[int, ...], kind: str) -> int:
    return int(np.prod(shape, dtype=np.int64)) * torch.empty(0, dtype=getattr(torch, kind)).element_size()
