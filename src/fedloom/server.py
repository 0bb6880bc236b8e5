"""The server's side of a round: what is sent, which replies are accepted, the reduce, the stages."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fedloom import reducers, transfer, tree
from fedloom.bound import Bound
from fedloom.errors import RunError
from fedloom.reducers import Reducer
from fedloom.types import Cohort, Leaves, Memory, Message
from fedloom.work import Post, Reply


@dataclass(frozen=True, slots=True)
class ServerState:
    """What the server knows.

    Args:
        leaves: every leaf; personal ones at their initial values.
        memory: of the server's stages, by owner.
        round: number of rounds played.
    """

    leaves: Leaves
    memory: Memory
    round: int = 0


@dataclass(frozen=True, slots=True)
class Dispatch:
    """What a round begins with: the post for everybody, what is addressed to single clients, which leaves are personal now."""

    post: Post
    addressed: Mapping[str, Memory]
    keys: Mapping[str, Hashable]
    personal: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Draft:
    """The server after a round while the device may still be at work on it.

    Args:
        state: the server, but for what its stages decide.
        changed: the leaves that have moved, and weights of a mean, which are still to be looked at.
        asked: values by which stages decide, by owner.
        cohort: whose replies it was made of.
    """

    state: ServerState
    changed: Leaves
    asked: Mapping[str, Leaves]
    cohort: Cohort

    def questions(self) -> list[Tensor]:
        """The values by which stages decide, in order."""
        return [value for values in self.asked.values() for value in values.values()]

    def decided(self, bound: Bound, told: Sequence[transfer.Array]) -> ServerState:
        """The server after the round, given the answers to :meth:`questions`."""
        if not self.asked:
            return self.state
        memory, answers = dict(self.state.memory), iter(told)
        for stage in bound.method.server.stages:
            if stage.decide is not None and stage.owner in self.asked:
                values = {name: next(answers) for name in self.asked[stage.owner]}
                kept = memory.get(stage.owner, {})
                memory[stage.owner] = {**kept, **stage.decide(kept, values, self.cohort)}
        return replace(self.state, memory=memory)


@dataclass(slots=True)
class Rejection:
    """A reply that was not accepted, and why."""

    client: str
    round: int
    reason: str


@dataclass(slots=True)
class Outcome:
    """Replies of a round, sorted."""

    accepted: list[Reply] = field(default_factory=list)
    rejected: list[Rejection] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


def opening(bound: Bound) -> ServerState:
    """The server before round one."""
    return ServerState(bound.start, bound.server_memory)


def handed_over(bound: Bound, state: ServerState) -> ServerState:
    """The server when another method takes over: what both have goes on, what the new one brings is as before round one."""
    leaves = {name: state.leaves.get(name, value) for name, value in bound.start.items()}
    return replace(state, leaves=leaves, memory={**bound.server_memory, **state.memory})


def dispatch(bound: Bound, state: ServerState, cohort: Cohort) -> tuple[ServerState, Dispatch]:
    """Runs the prepare stages and makes the post of a round."""
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


def foresee(bound: Bound, state: ServerState, cohort: Cohort) -> None:
    """Has prepare stages that remember something tried on a round to come; nothing else is kept of it."""
    for stage in bound.method.server.prepare:
        if stage.ahead and stage.owner in state.memory:
            stage.fn(state.memory[stage.owner], cohort)


def plain_dispatch(bound: Bound, state: ServerState, cohort: Cohort) -> Dispatch:
    """What the setup begins with: the post alone."""
    addressed: dict[str, Memory] = {name: {} for name in cohort.ids}
    sent = post(bound, state, cohort, {})
    return Dispatch(sent, addressed, {}, _personal(bound, state, sent))


def _personal(bound: Bound, state: ServerState, sent: Post) -> tuple[str, ...]:
    off = sent.off
    return personal_now(bound, state) if off is None else tuple(name for name in sent.gate if name in off)


def post(bound: Bound, state: ServerState, cohort: Cohort, broadcast: Memory, *, tested: bool = False) -> Post:
    """The post for everybody; with ``tested``, of the model that is evaluated rather than the one that is sent."""
    gate = bound.method.server.gate
    leaves, rule = state.leaves, bound.method.evaluate.tested
    gates = {} if gate is None else gate(state.memory)
    device, off = next(iter(leaves.values())).device, None
    if gates and next(iter(gates.values())).device.type == "cpu":  # where the server decides, which then knows them
        off = frozenset(tree.off(gates))
        if device.type != "cpu":
            gates = _gates_on(device, next(iter(gates.values())).dtype, tuple(gates), off)
    return Post(
        leaves=rule(leaves, state.memory) if tested and rule is not None else leaves,
        broadcast=broadcast,
        gate=gates,
        round=cohort.round,
        cohort=len(cohort),
        population=cohort.population,
        off=off,
    )


@lru_cache(maxsize=8)
def _gates_on(device: torch.device, kind: torch.dtype, names: tuple[str, ...], off: frozenset[str]) -> Leaves:
    """Gates on a device, a tensor each; the same ones come again from round to round."""
    with torch.inference_mode(False):  # they are for everybody who comes later
        host = torch.tensor([float(name not in off) for name in names], dtype=kind)
        return dict(zip(names, transfer.onto(host, device).unbind(), strict=True))


class Sorting:
    """The replies of a round while the device may still be at work on them: whole and finite ones will be accepted.

    Whether they are finite is asked at once and answered in :meth:`outcome`; nobody waits before. A client that made no
    step sends nothing and is skipped.

    Args:
        bound: the method.
        state: the server before the round.
        replies: of the clients that were asked.
    """

    def __init__(self, bound: Bound, state: ServerState, replies: Sequence[Reply]) -> None:
        self.bound, self.state, self.replies = bound, state, replies
        trains = bool(bound.method.phases("round"))
        self.skipped = [r.fault is None and trains and not any(r.steps.values()) for r in replies]
        expected: dict[str, tuple[set[str], dict[str, torch.Size]]] = {}
        self.faults: list[str | None] = []
        waves = dict[int, str | None]()  # replies made side by side are alike: one of them is looked at
        for reply, idle in zip(replies, self.skipped, strict=True):
            fault = reply.fault
            if not idle and fault is None:
                if reply.beside not in waves:
                    waves[reply.beside] = _fault(bound, reply, expected)
                fault = waves[reply.beside]
            self.faults.append(fault)
        self.pending = [r for r in replies if r.unread is not None]
        self.asked = tree.Finite()
        # Of replies made side by side one size is known, which is asked for once.
        sizes = {r.beside: r.size for r in replies if r.size is not None}
        self.asked.ask_sizes(list(sizes.values()))
        alone = [r for r in replies if r.size is None]
        self.asked.ask([_floating(r) for r in alone])
        told = {beside: i for i, beside in enumerate([*sizes, *(r.beside for r in alone)])}
        self.places = [told[r.beside] for r in replies]
        self.ahead: tuple[int, Draft] | None = None
        self.sound, self.told = True, list[transfer.Array]()

    def anticipate(self, cohort: Callable[[Sequence[str]], Cohort]) -> None:
        """Aggregates as if all whole replies were finite, as they nearly always are, while the device is at work on them.

        Whether the server's leaves are finite is then asked in the same breath. Where a reply is not, nothing is kept of it.
        """
        facts = zip(self.replies, self.skipped, self.faults, strict=True)
        whole = [reply for reply, idle, fault in facts if not idle and fault is None]
        if not whole or not self.pending:
            return
        try:
            draft = _aggregated(self.bound, self.state, whole, cohort([r.id for r in whole]), "round")
        except Exception:  # it may be for a reply that is not finite: those that are accepted will tell
            return
        self.asked.ask([draft.changed])
        self.ahead = (len(whole), draft)

    def send(self) -> None:
        """Has all answers sent when the device is that far: what it does for the next round comes behind them."""
        unread = [reply.unread for reply in self.pending if reply.unread is not None]
        losses = [reducers.together(unread)] if unread else []
        questions = [] if self.ahead is None else self.ahead[1].questions()
        self.asked.send([*losses, *questions])

    def leaves(self) -> Leaves:
        """The server's leaves as they will be, as far as that is known before the device is waited for."""
        return (self.state if self.ahead is None else self.ahead[1].state).leaves

    def outcome(self, round: int) -> Outcome:
        """The replies, sorted, once the answers that were sent for are there: from here on the device is waited for."""
        outcome = Outcome()
        sound, told = self.asked.answer()
        for reply, loss in zip(self.pending, told[0].tolist() if self.pending else (), strict=True):
            reply.loss, reply.unread = loss, None
        self.told = told[bool(self.pending) :]
        each, rest = [sound[place] for place in self.places], sound[len(set(self.places)) :]
        for reply, idle, fault, finite in zip(self.replies, self.skipped, self.faults, each, strict=True):
            if idle:
                outcome.skipped.append(reply.id)
                continue
            reason = fault if fault is not None or finite else _not_finite(reply)
            if reason is None:
                outcome.accepted.append(reply)
            else:
                outcome.rejected.append(Rejection(reply.id, round, reason))
        self.sound = all(rest)
        return outcome

    def aggregate(self, accepted: Sequence[Reply], cohort: Callable[[Sequence[str]], Cohort]) -> ServerState:
        """The server after the round, given the replies of :meth:`outcome` that were accepted."""
        if self.ahead is None or self.ahead[0] != len(accepted):
            return aggregate(self.bound, self.state, accepted, cohort([r.id for r in accepted]))
        draft = self.ahead[1]
        if not self.sound:
            raise _broken(draft.changed)
        return draft.decided(self.bound, self.told)


def _floating(reply: Reply) -> Leaves:
    """All that a reply brings, under names of its own."""
    sent = {f"{entry} {k}": v for entry, value in reply.message.items() for k, v in value.items()}
    return sent | reply.state.leaves


def _fault(bound: Bound, reply: Reply, expected: dict[str, tuple[set[str], dict[str, torch.Size]]]) -> str | None:
    """What is wrong with a reply that came."""
    for entry, value in reply.message.items():
        if entry not in expected:
            known = [name for name in value if name in bound.specs] if entry in ("delta", "buffers") else []
            expected[entry] = set(value), {name: bound.start[name].shape for name in known}
        names, shapes = expected[entry]
        if value.keys() != names:
            return f"entry {entry!r} has other leaves than the other clients'"
        for name, shape in shapes.items():
            if value[name].shape != shape:
                return f"{entry}[{name!r}] has shape {tuple(value[name].shape)}, expected {tuple(shape)}"
    return None


def _not_finite(reply: Reply) -> str | None:
    """What is not finite in a reply: it may be that of a client beside it."""
    for entry, value in reply.message.items():
        if not tree.all_finite(value):
            return f"{entry}[{_first_bad(value)!r}] is not finite"
    kept = reply.state.leaves
    return None if tree.all_finite(kept) else f"its own leaf {_first_bad(kept)!r} is not finite"


def _first_bad(leaves: Leaves) -> str:
    return next(k for k, v in leaves.items() if not tree.all_finite({k: v}))


def aggregate(
    bound: Bound, state: ServerState, accepted: Sequence[Reply], cohort: Cohort, when: str = "round"
) -> ServerState:
    """Reduces the accepted messages, runs the stages, and moves the server's leaves."""
    draft = _aggregated(bound, state, accepted, cohort, when)
    (sound,), told = tree.finite([draft.changed], draft.questions())
    if not sound:
        raise _broken(draft.changed)
    return draft.decided(bound, told)


def _aggregated(bound: Bound, state: ServerState, accepted: Sequence[Reply], cohort: Cohort, when: str) -> Draft:
    """The server after a round, for which nobody waits."""
    messages = [r.message for r in accepted]
    wanted: dict[str, tuple[str, Reducer]] = {}
    if messages:
        sent = messages[0]
        wanted = {e: (e, reducer) for e, reducer in bound.method.reducers(when).items() if e in sent}
        for stage in bound.method.upload:
            if stage.when == when:
                wanted |= stage.also
    reduced, unsure = reducers.reduced(wanted, messages, cohort.rows)
    memory, asked = dict(state.memory), dict[str, Leaves]()
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
            if server_stage.decide is not None and "asked" in reduced:
                asked[server_stage.owner] = reduced["asked"]
                reduced = {entry: value for entry, value in reduced.items() if entry != "asked"}
    if aside:
        reduced["delta"] = {**reduced["delta"], **aside, **reduced.get("personal", {})}
        memory = _forget(memory, bound.server_memory, off)
    leaves, changed = _moved(state.leaves, reduced)
    state = ServerState(leaves, memory, state.round + (when != "setup"))
    return Draft(state, {**unsure, **changed}, asked, cohort)


def personal_now(bound: Bound, state: ServerState) -> tuple[str, ...]:
    """Gated leaves that are personal in the round that follows a state."""
    gate = bound.method.server.gate
    return () if gate is None else tuple(tree.off(gate(state.memory)))


def _forget(memory: Memory, initial: Memory, off: tuple[str, ...]) -> Memory:
    """The memory of stages with what belongs to personal leaves as it was before round one."""
    names = set(off)

    def theirs(owner: str) -> Leaves:
        before = initial.get(owner, {})
        return {k: v for k, v in before.items() if k in memory[owner] and names & {k, k.split("/", 1)[-1]}}

    return {owner: kept | theirs(owner) for owner, kept in memory.items()}


def reports(bound: Bound, state: ServerState) -> dict[str, Mapping[str, Any]]:
    """What server stages report of a round, by owner."""
    found: dict[str, Mapping[str, Any]] = {}
    for stage in bound.method.server.stages:
        if stage.report is not None:
            found[stage.owner] = stage.report(state.memory.get(stage.owner, {}))
    return found


def apply(leaves: Leaves, reduced: Message) -> Leaves:
    """``w + D`` for parameters and floating buffers; counters are set."""
    moved, changed = _moved(leaves, reduced)
    if not tree.all_finite(changed):
        raise _broken(changed)
    return moved


def _moved(leaves: Leaves, reduced: Message) -> tuple[Leaves, Leaves]:
    steps = {**reduced.get("delta", {}), **reduced.get("buffers", {})}
    sums = torch._foreach_add([leaves[name] for name in steps], list(steps.values())) if steps else ()
    changed = dict(zip(steps, sums, strict=True))
    return {**leaves, **changed, **reduced.get("counters", {})}, changed


def _broken(changed: Leaves) -> RunError:
    bad = _first_bad(changed)
    if bad.startswith(reducers.WEIGHTS):
        return RunError(f"{bad} do not add up to a positive finite number in this round")
    return RunError(f"the server's leaf {bad!r} is no longer finite after the server stages")
