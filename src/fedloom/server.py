"""The server's side of a round: prepare what is sent, aggregate the replies, check them, move the leaves."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from fedloom import reducers, transfer, tree
from fedloom.bound import Bound
from fedloom.errors import RunError
from fedloom.reducers import Reducer
from fedloom.types import Cohort, Leaves, Memory, Message
from fedloom.work import Post, Reply

When = Literal["round", "setup"]


@dataclass(frozen=True, slots=True)
class ServerState:
    """What the server knows.

    Args:
        leaves: every leaf; personal ones at their initial values.
        memory: memory of the server stages, by owner.
        round: number of rounds played.
    """

    leaves: Leaves
    memory: Memory
    round: int = 0


@dataclass(frozen=True, slots=True)
class Dispatch:
    """What the clients of a round are sent.

    Args:
        post: what everybody gets.
        addressed: what single clients get, by client and owner.
        keys: static key of each client.
        personal: gated leaves that are personal in this round.
    """

    post: Post
    addressed: Mapping[str, Memory]
    keys: Mapping[str, Hashable]
    personal: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Rejection:
    """A reply that was not accepted, and why."""

    client: str
    reason: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """The replies of a round, sorted.

    Args:
        accepted: replies that were aggregated. Their losses are numbers.
        rejected: replies that are malformed or not finite.
        skipped: clients that made no step.
    """

    accepted: Sequence[Reply] = ()
    rejected: Sequence[Rejection] = ()
    skipped: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class PendingRound:
    """A round that was aggregated before anybody knows whether its replies are finite.

    Args:
        before: the server's state before the round.
        after: the server's state if all candidates are finite; None where the aggregation raised an error.
        candidates: the well-formed replies.
        outcome: the other replies: malformed ones are rejected, clients without a step are skipped.
        numbers: what :func:`confirm` reads, in one tensor: a number that is finite only if the candidates and the new
            leaves are, then the loss of each candidate whose loss is still on the device.
        aggregate: aggregates some of the candidates again, and reads uploaded weights on the host to check them.
    """

    before: ServerState
    after: ServerState | None
    candidates: Sequence[Reply]
    outcome: Outcome
    numbers: Tensor
    aggregate: Callable[[Sequence[Reply]], ServerState]


def opening(bound: Bound) -> ServerState:
    """The server's state before round one."""
    return ServerState(bound.start, bound.server_memory)


def handed_over(bound: Bound, state: ServerState) -> ServerState:
    """The server's state when another method takes over: common leaves and memory stay, those it adds are initial."""
    leaves = {name: state.leaves.get(name, value) for name, value in bound.start.items()}
    return replace(state, leaves=leaves, memory={**bound.server_memory, **state.memory})


# The beginning of a round.


def dispatch(bound: Bound, state: ServerState, cohort: Cohort) -> tuple[ServerState, Dispatch]:
    """Runs the prepare stages and makes what the clients of a round are sent."""
    server = bound.method.server
    memory = dict(state.memory)
    broadcast: Memory = {}
    addressed: dict[str, Memory] = {name: {} for name in cohort.ids}
    keys: dict[str, Hashable] = {}
    for stage in server.prepare:
        prepared = stage.fn(memory.get(stage.owner, {}), cohort)
        if stage.owner in memory:
            memory[stage.owner] = prepared.memory
        if prepared.broadcast:
            broadcast[stage.owner] = prepared.broadcast
        for name, value in prepared.addressed.items():
            addressed[name][stage.owner] = value
        keys.update(prepared.keys)
    state = replace(state, memory=memory)
    sent = post(bound, state, cohort, broadcast)
    return state, Dispatch(sent, addressed, keys, _personal(bound, state, sent))


def plain_dispatch(bound: Bound, state: ServerState, cohort: Cohort) -> Dispatch:
    """What the clients are sent in the setup program: no prepare stage runs."""
    addressed: dict[str, Memory] = {name: {} for name in cohort.ids}
    sent = post(bound, state, cohort, {})
    return Dispatch(sent, addressed, {}, _personal(bound, state, sent))


def _personal(bound: Bound, state: ServerState, sent: Post) -> tuple[str, ...]:
    off = sent.off
    return personal_now(bound, state) if off is None else tuple(name for name in sent.gate if name in off)


def post(bound: Bound, state: ServerState, cohort: Cohort, broadcast: Memory, *, tested: bool = False) -> Post:
    """What everybody is sent; with ``tested``, of the model that is evaluated rather than the one that is trained."""
    gate = bound.method.server.gate
    leaves, rule = state.leaves, bound.method.evaluate.tested
    gates = {} if gate is None else gate(state.memory)
    device, off = next(iter(leaves.values())).device, None
    if gates and next(iter(gates.values())).is_cpu:
        off = frozenset(tree.zero_names(gates))
        if device.type != "cpu":
            values = torch.stack(list(gates.values()))
            gates = dict(zip(gates, transfer.onto(values, device).unbind(), strict=True))
    return Post(
        leaves=rule(leaves, state.memory) if tested and rule is not None else leaves,
        broadcast=broadcast,
        gate=gates,
        round=cohort.round,
        cohort=len(cohort),
        population=cohort.population,
        off=off,
    )


# The end of a round.


def aggregate_replies(
    bound: Bound,
    state: ServerState,
    replies: Sequence[Reply],
    cohort_of: Callable[[Sequence[str]], Cohort],
    when: When = "round",
) -> PendingRound:
    """Aggregates all well-formed replies as if they were finite. Does not wait for the device unless a stage does.

    Args:
        bound: the method.
        state: the server's state before the round.
        replies: one reply per client.
        cohort_of: the facts of a cohort, given its clients.
        when: the program that the clients ran.
    """

    def aggregate_some(some: Sequence[Reply], *, read_weights: bool = True) -> ServerState:
        cohort = cohort_of([r.id for r in some])
        return aggregate(bound, state, some, cohort, when, read_weights=read_weights)

    candidates, outcome = _well_formed(bound, replies, when)
    after: ServerState | None = None
    if candidates:
        try:
            after = aggregate_some(candidates, read_weights=False)
        except Exception:
            # A stage may fail on a reply that is not finite. `confirm` aggregates again and then raises errors of its own.
            after = None
    return PendingRound(state, after, candidates, outcome, _numbers(candidates, state, after), aggregate_some)


def confirm(pending: PendingRound) -> tuple[ServerState, Outcome]:
    """Waits for the device once. If something is not finite, aggregates again without the replies that are not.

    Returns the state before the round if no reply is accepted.

    Raises:
        RunError: all replies are finite and a leaf of the server is not.
    """
    indicator, *values = pending.numbers.tolist()
    losses = iter(values)
    candidates = [replace(r, loss=next(losses)) if isinstance(r.loss, Tensor) else r for r in pending.candidates]
    finite = math.isfinite(indicator) and not any(map(_loss_fault, candidates))
    if pending.after is not None and finite:
        return pending.after, replace(pending.outcome, accepted=candidates)
    faults = [first_fault(reply) for reply in candidates]
    accepted = [reply for reply, fault in zip(candidates, faults, strict=True) if fault is None]
    rejected = [Rejection(r.id, fault) for r, fault in zip(candidates, faults, strict=True) if fault is not None]
    outcome = replace(pending.outcome, accepted=accepted, rejected=[*pending.outcome.rejected, *rejected])
    if not accepted:
        return pending.before, outcome
    after = pending.aggregate(accepted)
    check_leaves(after.leaves)
    return after, outcome


def check_leaves(leaves: Leaves) -> None:
    """Refuses leaves of the server that are not finite.

    Raises:
        RunError: one of them holds a NaN or an infinity.
    """
    name = tree.first_non_finite(leaves)
    if name is not None:
        raise RunError(f"the server's leaf {name!r} is no longer finite after the server stages")


# The check of replies. A reply is accepted if its message is well formed and all that it brings is finite.


def _contents(reply: Reply) -> Iterator[tuple[str, Leaves]]:
    """All tensors that a reply brings but its loss: what is sent, and what the client keeps."""
    yield from reply.message.items()
    yield "its own leaves", reply.state.leaves
    for owner, memory in reply.state.memory.items():
        yield f"its memory of {owner}", memory


def first_fault(reply: Reply) -> str | None:
    """The first thing in a reply that is not finite, in words; None where all is."""
    for what, leaves in _contents(reply):
        name = tree.first_non_finite(leaves)
        if name is not None:
            return f"{what}[{name!r}] is not finite"
    return _loss_fault(reply)


def _loss_fault(reply: Reply) -> str | None:
    """Whether the loss of a client that made a step is not finite. Of no steps it is the mean of nothing, a NaN."""
    if reply.loss is None or not any(reply.steps.values()):
        return None
    loss = float(reply.loss)
    return None if math.isfinite(loss) else f"its training loss is {loss}"


def _numbers(candidates: Sequence[Reply], before: ServerState, after: ServerState | None) -> Tensor:
    """What decides about a round, in one tensor of the device (see :class:`PendingRound`)."""
    values = [v for reply in candidates for _, leaves in _contents(reply) for v in leaves.values()]
    if after is not None:
        values += [v for name, v in after.leaves.items() if v is not before.leaves[name]]
    indicator = tree.finite_indicator(values).reshape(1)
    losses = [r.loss for r in candidates if isinstance(r.loss, Tensor)]
    return torch.cat([indicator, reducers.together(losses).double()]) if losses else indicator


def _well_formed(bound: Bound, replies: Sequence[Reply], when: When) -> tuple[list[Reply], Outcome]:
    """The well-formed replies, and the others: malformed ones are rejected, clients that made no step are skipped."""
    trains = when == "round" and bool(bound.method.phases("round"))
    candidates, rejected, skipped = list[Reply](), list[Rejection](), list[str]()
    for reply in replies:
        if reply.fault is not None:
            rejected.append(Rejection(reply.id, reply.fault))
        elif trains and not any(reply.steps.values()):
            skipped.append(reply.id)
        else:
            fault = _malformed(bound, reply.message, candidates[0].message if candidates else reply.message)
            if fault is None:
                candidates.append(reply)
            else:
                rejected.append(Rejection(reply.id, fault))
    return candidates, Outcome((), rejected, skipped)


def _malformed(bound: Bound, message: Message, first: Message) -> str | None:
    """What is wrong with the form of a message, compared with that of the first client."""
    if message.keys() != first.keys():
        return f"it sends {sorted(message)}, where the other clients send {sorted(first)}"
    for entry, values in message.items():
        if values.keys() != first[entry].keys():
            return f"entry {entry!r} has other leaves than the other clients'"
        for name in values if entry in ("delta", "buffers") else ():
            if name in bound.specs and values[name].shape != bound.start[name].shape:
                shape, expected = tuple(values[name].shape), tuple(bound.start[name].shape)
                return f"{entry}[{name!r}] has shape {shape}, expected {expected}"
    return None


# The aggregation.


def aggregate(
    bound: Bound,
    state: ServerState,
    replies: Sequence[Reply],
    cohort: Cohort,
    when: When = "round",
    *,
    read_weights: bool = False,
) -> ServerState:
    """The server's new state: reduces the messages, runs the server stages, moves the leaves. Changes no argument.

    Args:
        bound: the method.
        state: the server's state before the round.
        replies: the replies that count.
        cohort: the facts of their clients.
        when: the program that the clients ran.
        read_weights: whether uploaded weights are read and checked on the host, or used where they are.
    """
    messages = [r.message for r in replies]
    wanted: dict[str, tuple[str, Reducer]] = {}
    if messages:
        sent = messages[0]
        wanted = {e: (e, reducer) for e, reducer in bound.method.reducers(when).items() if e in sent}
        for stage in bound.method.upload:
            if stage.when == when:
                wanted |= stage.also
    reduced = reducers.reduced(wanted, messages, cohort.rows, read_weights=read_weights)
    memory = dict(state.memory)
    off = personal_now(bound, state)
    delta = reduced.get("delta", {})
    aside = {name: delta[name] for name in off if name in delta}
    if aside:
        reduced["delta"] = {**delta, **tree.zeros_like(aside)}
    for server_stage in bound.method.server.stages:
        if server_stage.when == when:
            reduced, kept = server_stage.fn(reduced, memory.get(server_stage.owner, {}), cohort)
            if server_stage.owner in memory:
                memory[server_stage.owner] = kept
    if aside:
        reduced["delta"] = {**reduced["delta"], **aside, **reduced.get("personal", {})}
        memory = _forget(memory, bound.server_memory, off)
    return ServerState(add_update(state.leaves, reduced), memory, state.round + (when == "round"))


def add_update(leaves: Leaves, reduced: Message) -> Leaves:
    """``w + D`` for parameters and floating buffers; counters are set."""
    steps = {**reduced.get("delta", {}), **reduced.get("buffers", {})}
    sums = torch._foreach_add([leaves[name] for name in steps], list(steps.values())) if steps else ()
    return {**leaves, **dict(zip(steps, sums, strict=True)), **reduced.get("counters", {})}


def personal_now(bound: Bound, state: ServerState) -> tuple[str, ...]:
    """Gated leaves that are personal in the round that follows a state."""
    gate = bound.method.server.gate
    return () if gate is None else tuple(tree.zero_names(gate(state.memory)))


def _forget(memory: Memory, initial: Memory, off: tuple[str, ...]) -> Memory:
    """The memory of stages with what belongs to personal leaves as it was before round one."""
    names = set(off)

    def initial_values(owner: str) -> Leaves:
        before = initial.get(owner, {})
        return {k: v for k, v in before.items() if k in memory[owner] and names & {k, k.split("/", 1)[-1]}}

    return {owner: kept | initial_values(owner) for owner, kept in memory.items()}


def reports(bound: Bound, state: ServerState) -> dict[str, Mapping[str, Any]]:
    """What server stages report of a round, by owner."""
    found: dict[str, Mapping[str, Any]] = {}
    for stage in bound.method.server.stages:
        if stage.report is not None:
            found[stage.owner] = stage.report(state.memory.get(stage.owner, {}))
    return found
