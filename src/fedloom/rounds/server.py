"""The server's side of a round.

:func:`dispatch` runs the prepare stages and makes the messages to the clients. :func:`aggregate_replies`
computes the new server state without waiting for the device, as if all replies were finite.
:func:`confirm` reads the result of the check once, and aggregates again if a reply is not finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from fedloom import devices, tensors
from fedloom.clients.messages import Post, Reply
from fedloom.clients.states import ServerState
from fedloom.errors import RunError
from fedloom.network.bound_method import Bound
from fedloom.spec import reducers
from fedloom.spec.reducers import Reducer
from fedloom.spec.seen import Cohort
from fedloom.tensors import Leaves, Memory, Message

When = Literal["round", "setup"]


@dataclass(frozen=True, slots=True)
class Dispatch:
    """The server's messages of a round.

    Args:
        post: the message to all clients.
        addressed: the messages to single clients, by client and owner.
        keys: static key of each client.
    """

    post: Post
    addressed: Mapping[str, Memory]
    keys: Mapping[str, Hashable]


@dataclass(frozen=True, slots=True)
class Rejection:
    """A reply that the server does not accept, with the reason."""

    client: str
    reason: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of the check of a round's replies.

    Args:
        accepted: replies that were aggregated.
        rejected: replies that are malformed or not finite.
        skipped: clients that made no step.
        losses: training loss of each accepted reply that has one, by client.
    """

    accepted: Sequence[Reply] = ()
    rejected: Sequence[Rejection] = ()
    skipped: Sequence[str] = ()
    losses: Mapping[str, float] = field(default_factory=dict)

    @property
    def reasons(self) -> str:
        """The rejected clients with their reasons, for error messages."""
        return "; ".join(f"client {r.client}: {r.reason}" for r in self.rejected)


@dataclass(frozen=True, slots=True)
class PendingRound:
    """Round that is aggregated before the host knows whether all replies are finite.

    Args:
        before: the server's state before the round.
        after: the server's state if all candidates are finite; None if the aggregation raised an error.
        candidates: the well-formed replies.
        outcome: the other replies: malformed ones are rejected, clients without a step are skipped.
        numbers: the tensor that :func:`confirm` reads, shape ``(1 + losses,)``: an indicator that is
            finite only if the candidates and the new leaves are, then the losses that are on the device.
        aggregate: aggregates some of the candidates again. Reads uploaded weights on the host to check them.
    """

    before: ServerState
    after: ServerState | None
    candidates: Sequence[Reply]
    outcome: Outcome
    numbers: Tensor
    aggregate: Callable[[Sequence[Reply]], ServerState]


def initial_state(bound: Bound) -> ServerState:
    """Return the server's state before round one."""
    return ServerState(bound.start, bound.server_memory)


def switch_method(bound: Bound, state: ServerState) -> ServerState:
    """Return the state for another method: it keeps common leaves and memory, the method's others are initial."""
    leaves = {name: state.leaves.get(name, value) for name, value in bound.start.items()}
    return replace(state, leaves=leaves, memory={**bound.server_memory, **state.memory})


# The beginning of a round.


def dispatch(bound: Bound, state: ServerState, cohort: Cohort) -> tuple[ServerState, Dispatch]:
    """Run the prepare stages and make the messages of a round.

    Returns:
        The state with the memory that the prepare stages return, and the messages.
    """
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
    return state, Dispatch(post(bound, state, cohort, broadcast), addressed, keys)


def setup_dispatch(bound: Bound, state: ServerState, cohort: Cohort) -> Dispatch:
    """Make the messages of the setup program. No prepare stage runs."""
    return Dispatch(post(bound, state, cohort, {}), {name: {} for name in cohort.ids}, {})


def post(bound: Bound, state: ServerState, cohort: Cohort, broadcast: Memory, *, tested: bool = False) -> Post:
    """Make the message to all clients.

    Args:
        bound: the method.
        state: the server's state.
        cohort: the clients.
        broadcast: tensors of the prepare stages, by owner.
        tested: whether to send the model that is evaluated in place of the one that is trained.
    """
    leaves, rule = state.leaves, bound.method.evaluate.tested
    gates = _gates(bound, state)
    off = frozenset(tensors.zero_names(gates)) if gates else None
    if gates:  # one copy for all; a server stage decides about gates on the host
        values = torch.stack(list(gates.values()))
        device = next(iter(leaves.values())).device
        gates = dict(zip(gates, devices.to_device_async(values, device).unbind(), strict=True))
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
    """Aggregate all well-formed replies as if they were finite. Waits for the device only if a stage does.

    Args:
        bound: the method.
        state: the server's state before the round.
        replies: one reply per client.
        cohort_of: returns the facts of a cohort from the ids of its clients.
        when: the program that the clients ran.
    """

    def aggregate_subset(subset: Sequence[Reply], *, read_weights: bool = True) -> ServerState:
        cohort = cohort_of([r.id for r in subset])
        return aggregate(bound, state, subset, cohort, when, read_weights=read_weights)

    candidates, outcome = _well_formed(bound, replies, when)
    received = [v for reply in candidates for _, leaves in _tensors(reply) for v in leaves.values()]
    indicator = tensors.finite_indicator(received)  # before the stages: one of them may wait for the device
    after: ServerState | None = None
    if candidates:
        try:
            after = aggregate_subset(candidates, read_weights=False)
        except Exception:
            # A stage may fail on a reply that is not finite. `confirm` aggregates again and raises the stage's own errors.
            after = None
    if after is not None:
        changed = [v for name, v in after.leaves.items() if v is not state.leaves[name]]
        indicator = indicator + tensors.finite_indicator(changed)
    losses = [r.loss for r in candidates if isinstance(r.loss, Tensor)]
    numbers = indicator.reshape(1)
    if losses:
        numbers = torch.cat([numbers, reducers.stack_or_view(losses).double()])
    return PendingRound(state, after, candidates, outcome, numbers, aggregate_subset)


def confirm(pending: PendingRound) -> tuple[ServerState, Outcome]:
    """Read the check of a round. If it fails, aggregate again without the replies that are not finite.

    Returns:
        The state after the round, or the state before it if no reply is accepted, and the sorted replies.

    Raises:
        RunError: all accepted replies are finite and a leaf of the server is not.
    """
    indicator, *values = pending.numbers.tolist()  # waits for the device
    from_device = iter(values)
    losses = {
        r.id: next(from_device) if isinstance(r.loss, Tensor) else r.loss
        for r in pending.candidates
        if r.loss is not None
    }
    finite = math.isfinite(indicator) and not any(_loss_fault(r, losses.get(r.id)) for r in pending.candidates)
    if pending.after is not None and finite:
        return pending.after, replace(pending.outcome, accepted=pending.candidates, losses=losses)
    outcome = _reject_non_finite(pending.candidates, pending.outcome)
    outcome = replace(outcome, losses={r.id: losses[r.id] for r in outcome.accepted if r.id in losses})
    if not outcome.accepted:
        return pending.before, outcome
    after = pending.aggregate(outcome.accepted)
    check_leaves(after.leaves)
    return after, outcome


def check_leaves(leaves: Leaves) -> None:
    """Raise RunError if a leaf of the server holds a NaN or an infinity."""
    name = tensors.first_non_finite(leaves)
    if name is not None:
        raise RunError(f"the server's leaf {name!r} is no longer finite after the server stages")


# The check of replies. The server accepts a reply if its message is well formed and if message, kept leaves, memory
# and loss are finite.


def check_replies(bound: Bound, replies: Sequence[Reply], when: When) -> Outcome:
    """Check replies that are not aggregated. Waits for the device.

    Args:
        bound: the method.
        replies: one reply per client.
        when: the program that the clients ran.
    """
    candidates, outcome = _well_formed(bound, replies, when)
    return _reject_non_finite(candidates, outcome)


def _reject_non_finite(candidates: Sequence[Reply], outcome: Outcome) -> Outcome:
    """Add well-formed replies to an outcome: accepted if all their values are finite, else rejected."""
    faults = [first_fault(reply) for reply in candidates]
    accepted = [reply for reply, fault in zip(candidates, faults, strict=True) if fault is None]
    rejected = [Rejection(r.id, fault) for r, fault in zip(candidates, faults, strict=True) if fault is not None]
    return replace(outcome, accepted=accepted, rejected=[*outcome.rejected, *rejected])


def _tensors(reply: Reply) -> Iterator[tuple[str, Leaves]]:
    """Yield all tensors of a reply except its loss, with a description: message, kept leaves, memory."""
    yield from reply.message.items()
    yield "its own leaves", reply.state.leaves
    for owner, memory in reply.state.memory.items():
        yield f"its memory of {owner}", memory


def first_fault(reply: Reply) -> str | None:
    """Describe the first value of a reply that is not finite; None if all are finite."""
    for description, leaves in _tensors(reply):
        name = tensors.first_non_finite(leaves)
        if name is not None:
            return f"{description}[{name!r}] is not finite"
    return _loss_fault(reply, None if reply.loss is None else float(reply.loss))


def _loss_fault(reply: Reply, loss: float | None) -> str | None:
    """Describe a loss that is not finite; None if it is finite or the client made no step."""
    # Without a step the loss is the mean of no values, a NaN.
    if loss is None or not any(reply.steps.values()):
        return None
    return None if math.isfinite(loss) else f"its training loss is {loss}"


def _well_formed(bound: Bound, replies: Sequence[Reply], when: When) -> tuple[list[Reply], Outcome]:
    """Split replies into the well-formed ones and an outcome of the others.

    Malformed replies are rejected, clients that made no training step are skipped.
    """
    trains = when == "round" and bool(bound.method.phases("round"))
    candidates, rejected, skipped = list[Reply](), list[Rejection](), list[str]()
    for reply in replies:
        if reply.fault is not None:
            rejected.append(Rejection(reply.id, reply.fault))
        elif trains and not any(reply.steps.values()):
            skipped.append(reply.id)
        else:
            fault = _form_fault(bound, reply.message, candidates[0].message if candidates else reply.message)
            if fault is None:
                candidates.append(reply)
            else:
                rejected.append(Rejection(reply.id, fault))
    return candidates, Outcome((), rejected, skipped)


def _form_fault(bound: Bound, message: Message, first: Message) -> str | None:
    """Describe the first difference in form between a message and the first client's; None if there is none."""
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
    """Reduce the messages, run the server stages, add the update to the leaves. Changes no argument.

    Args:
        bound: the method.
        state: the server's state before the round.
        replies: the accepted replies, in federation order.
        cohort: the facts of their clients.
        when: the program that the clients ran.
        read_weights: whether uploaded weights are read and checked on the host; else they stay on the device.

    Returns:
        The server's state after the round.
    """
    messages = [r.message for r in replies]
    entries: dict[str, tuple[str, Reducer]] = {}
    if messages:
        first = messages[0]
        entries = {e: (e, reducer) for e, reducer in bound.method.reducers(when).items() if e in first}
        for stage in bound.method.upload:
            if stage.when == when:
                entries |= stage.also
    reduced = reducers.reduce_entries(entries, messages, cohort.rows, read_weights=read_weights)
    memory = dict(state.memory)
    # Server stages see no update of leaves that are personal in this round: their means are added after the stages.
    personal = personal_leaves(bound, state)
    delta = reduced.get("delta", {})
    personal_delta = {name: delta[name] for name in personal if name in delta}
    if personal_delta:
        reduced["delta"] = {**delta, **tensors.zeros_like(personal_delta)}
    for server_stage in bound.method.server.stages:
        if server_stage.when == when:
            reduced, new_memory = server_stage.fn(reduced, memory.get(server_stage.owner, {}), cohort)
            if server_stage.owner in memory:
                memory[server_stage.owner] = new_memory
    if personal_delta:
        reduced["delta"] = {**reduced["delta"], **personal_delta, **reduced.get("personal", {})}
        memory = _reset_memory(memory, bound.server_memory, personal)
    return ServerState(add_update(state.leaves, reduced), memory, state.round + (when == "round"))


def add_update(leaves: Leaves, reduced: Message) -> Leaves:
    """Return ``w + D`` for parameters and floating buffers, and the new values of counters."""
    steps = {**reduced.get("delta", {}), **reduced.get("buffers", {})}
    sums = torch._foreach_add([leaves[name] for name in steps], list(steps.values())) if steps else ()
    return {**leaves, **dict(zip(steps, sums, strict=True)), **reduced.get("counters", {})}


def _gates(bound: Bound, state: ServerState) -> Leaves:
    """Return per gated leaf 1 (shared) or 0 (personal in the next round); scalars of one type."""
    gate = bound.method.server.gate
    return {} if gate is None else gate(state.memory)


def personal_leaves(bound: Bound, state: ServerState) -> tuple[str, ...]:
    """Return the gated leaves that are personal in the next round."""
    return tuple(tensors.zero_names(_gates(bound, state)))


def _reset_memory(memory: Memory, initial: Memory, personal: tuple[str, ...]) -> Memory:
    """Return the server's memory with the entries of personal leaves reset to their initial values."""
    names = set(personal)

    def initial_values(owner: str) -> Leaves:
        before = initial.get(owner, {})
        return {k: v for k, v in before.items() if k in memory[owner] and names & {k, k.split("/", 1)[-1]}}

    return {owner: values | initial_values(owner) for owner, values in memory.items()}


def reports(bound: Bound, state: ServerState) -> dict[str, Mapping[str, Any]]:
    """Return the reports of the server stages on the last round, by owner."""
    stages = bound.method.server.stages
    return {s.owner: s.report(state.memory.get(s.owner, {})) for s in stages if s.report is not None}
