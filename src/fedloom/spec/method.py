"""The record: a method is data, a plug-in is a function from method to method.

A :class:`Method` has five slots (objective, partition, schedule, upload, server) and a rule for evaluation. It
holds no loop. Engines interpret it for one client or for a whole cohort.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import Tensor

from fedloom.errors import Conflict, UserError
from fedloom.spec.parts import (
    Copy,
    EvalRule,
    Extra,
    Partition,
    Phase,
    Prepare,
    Program,
    Receive,
    Rule,
    Schedule,
    Send,
    Server,
    ServerStage,
    Stage,
    Sweep,
    Term,
)
from fedloom.spec.reducers import Reducer
from fedloom.spec.seen import ReceiveRule, Seen
from fedloom.spec.structure import Pattern
from fedloom.tensors import Leaves, Memory


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """A federated method as data: five slots, a rule for evaluation, and a name.

    Args:
        objective: terms that are summed.
        partition: which leaves are shared, and what else a client's model is made of.
        schedule: a client's programs.
        upload: stages on a client's message, in order.
        server: stages before and after the reduce.
        evaluate: which model is a client's own.
        text: its text form.
        claims: what has been replaced, and by whom.
        tasks: names of the tasks it can serve; None for all.
        plain_sgd: its definition needs SGD without momentum; other optimisers run with a warning.
        then: ``(rounds, method)``: the method that takes over after so many rounds.
        sealed: why no plug-in can be stacked on it; empty for methods that take plug-ins.

    Attributes:
        text_is_complete: whether ``text`` names all parts. Only :meth:`with_complete_text` sets it, and
            :func:`dataclasses.replace` does not copy it: a changed method has an incomplete text.

    Example:
        >>> import fedloom as fl
        >>> fl.compose(fl.fedavg(), fl.proximal(mu=0.1)).text
        'fedavg() + proximal(mu=0.1)'
    """

    objective: tuple[Term, ...]
    partition: Partition = field(default_factory=Partition)
    schedule: Schedule = field(default_factory=Schedule)
    upload: tuple[Stage, ...] = ()
    server: Server = field(default_factory=Server)
    evaluate: EvalRule = field(default_factory=EvalRule)
    text: str = "method"
    claims: tuple[tuple[str, str], ...] = ()
    tasks: tuple[str, ...] | None = None
    plain_sgd: bool = False
    then: tuple[int, Method] | None = None
    sealed: str = ""
    text_is_complete: bool = field(default=False, init=False, repr=False, compare=False)

    def __str__(self) -> str:
        return self.text

    def with_complete_text(self, text: str) -> Method:
        """Return this method with a text form from which the registry builds the same method."""
        method = replace(self, text=text)
        object.__setattr__(method, "text_is_complete", True)
        return method

    # Additions: they never clash.

    def adding(
        self,
        *,
        terms: tuple[Term, ...] = (),
        rules: tuple[Rule, ...] = (),
        copies: tuple[Copy, ...] = (),
        extras: tuple[Extra, ...] = (),
        stages: tuple[Stage, ...] = (),
        prepare: tuple[Prepare, ...] = (),
        server: tuple[ServerStage, ...] = (),
    ) -> Method:
        """This method with more parts. A memory that two owners would keep under one name is a conflict."""
        method = self
        owners = [("client", s.owner) for s in stages if s.memory is not None]
        owners += [("server", s.owner) for s in server if s.memory is not None]
        for where, owner in owners:
            method = method.claiming(f"the {where} memory {owner!r}", owner)
        p, s = method.partition, method.server
        return replace(
            method,
            objective=method.objective + terms,
            partition=replace(p, rules=p.rules + rules, copies=p.copies + copies, extras=p.extras + extras),
            upload=method.upload + stages,
            server=replace(s, prepare=s.prepare + prepare, stages=s.stages + server),
        )

    def sweeping(self, sweep: Sweep, *, at: Literal["start", "end"] = "end") -> Method:
        """This method with one more sweep in its round: right after the receive, or right before the send."""
        method = self.claiming(f"the sweep {sweep.name!r}", sweep.name)
        steps = method.schedule.round
        where = 1 if at == "start" else len(steps) - 1
        assert isinstance(steps[0], Receive) and isinstance(steps[-1], Send)
        return replace(method, schedule=replace(method.schedule, round=(*steps[:where], sweep, *steps[where:])))

    # Replacements: each can be made once, so two plug-ins that both make it conflict.

    def claiming(self, what: str, owner: str) -> Method:
        """Marks a replaceable part as taken; a second claim is a :class:`Conflict`."""
        for taken, by in self.claims:
            if taken == what:
                raise Conflict(
                    f"{owner!r} cannot be stacked on {self.text!r}: both {by!r} and {owner!r} replace {what}; "
                    "leave one of them out"
                )
        return replace(self, claims=(*self.claims, (what, owner)))

    def replacing_data(self, *terms: Term) -> Method:
        """This method with another data term."""
        method = self.claiming("the data term", terms[0].owner)
        rest = tuple(t for t in method.objective if t.role != "data")
        return replace(method, objective=terms + rest)

    def replacing_reducer(self, owner: str, entry: str, reducer: Reducer) -> Method:
        """This method with another reducer of an entry of its message."""
        if not any(entry in s.entries for s in self.upload):
            raise Conflict(f"{owner!r} cannot be stacked on {self.text!r}, which does not upload {entry!r}")
        method = self.claiming(f"the reducer of the entry {entry!r}", owner)
        upload = tuple(
            replace(s, entries={**s.entries, entry: reducer}) if entry in s.entries else s for s in method.upload
        )
        return replace(method, upload=upload)

    def replacing_receive(self, owner: str, rule: ReceiveRule) -> Method:
        """This method with another rule for the start of a round."""
        method = self.claiming("the receive rule", owner)
        return replace(method, partition=replace(method.partition, receive=rule))

    def replacing_rewrite(self, owner: str, fn: Callable[[Tensor, Leaves, Seen], Tensor]) -> Method:
        """This method with the head's input rewritten."""
        method = self.claiming("the head's input", owner)
        return replace(method, partition=replace(method.partition, rewrite=fn))

    def replacing_evaluation(self, owner: str, **changes: Any) -> Method:
        """This method with another predict route, copy or tested model."""
        method = self
        for name in changes:
            if name != "taps":
                method = method.claiming({"predict": "the predict route"}.get(name, f"the evaluated {name}"), owner)
        return replace(method, evaluate=replace(method.evaluate, **changes))

    def replacing_gate(self, owner: str, gated: Pattern, gate: Callable[[Memory], Leaves]) -> Method:
        """This method with leaves that the server switches between shared and personal."""
        method = self.claiming("the gate", owner)
        return replace(
            method,
            partition=replace(method.partition, gated=gated),
            server=replace(method.server, gate=gate),
        )

    def replacing_schedule(self, owner: str, **changes: Any) -> Method:
        """This method with another program."""
        method = self
        for name in changes:
            method = method.claiming(f"the {name} program", owner)
        return replace(method, schedule=replace(method.schedule, **changes))

    # Questions.

    def reducers(self, when: str = "round") -> dict[str, Reducer]:
        """The reducer of every entry of the message, later stages winning."""
        found: dict[str, Reducer] = {}
        for stage in self.upload:
            if stage.when == when:
                found.update(stage.entries)
        return found

    def phases(self, program: Literal["setup", "round", "adapt", "server"] = "round") -> tuple[Phase, ...]:
        """The training phases of a program."""
        steps: Program = getattr(self.schedule, program)
        return tuple(s for s in steps if isinstance(s, Phase))

    def at(self, round: int) -> Method:
        """The method in force in a round (``then`` takes over after some rounds)."""
        return self.then[1].at(round) if self.then is not None and round > self.then[0] else self


@dataclass(frozen=True, slots=True)
class Plugin:
    """A function from method to method, with its text form.

    Args:
        text: the text form.
        apply: returns the changed method.
        registered: whether the registry builds the same plug-in from ``text``.
    """

    text: str
    apply: Callable[[Method], Method]
    registered: bool = False

    def __call__(self, method: Method) -> Method:
        """The method with this plug-in on it."""
        if method.sealed:
            name = self.text.partition("(")[0]
            raise Conflict(f"{name!r} cannot be stacked on {method.text!r}: {method.sealed}")
        changed = self.apply(method)
        check_order(changed)
        then = changed.then and (changed.then[0], self(changed.then[1]))
        text, changed = f"{method.text} + {self.text}", replace(changed, then=then)
        if self.registered and method.text_is_complete:
            return changed.with_complete_text(text)
        return replace(changed, text=text)

    def __str__(self) -> str:
        return self.text


def compose(base: Method, *plugins: Plugin) -> Method:
    """Stacks plug-ins on a method, in the order in which their stages shall run.

    Args:
        base: a recipe such as ``fl.fedavg()``.
        *plugins: plug-ins such as ``fl.proximal(mu=0.01)``.

    Raises:
        Conflict: if two parts replace the same thing.

    Example:
        >>> import fedloom as fl
        >>> print(fl.compose(fl.fedper(), fl.proximal(mu=0.1), fl.clip(norm=1.0)))
        fedper() + proximal(mu=0.1) + clip(norm=1.0)
    """
    if not isinstance(base, Method):
        raise UserError(f"compose: the first part must be a method such as fl.fedavg(), not {base!r}")
    method = base
    for plugin in plugins:
        if isinstance(plugin, Method):
            raise UserError(
                f"compose: {plugin.text!r} is a method, and a method can only stand first; "
                "stack plug-ins on it (fl.list_plugins() names them)"
            )
        if not isinstance(plugin, Plugin):
            raise UserError(f"compose: expected a plug-in such as fl.proximal(mu=0.01), not {plugin!r}")
        method = plugin(method)
    return method


def check_order(method: Method) -> None:
    """Upload stages run as written; a stage that must follow another may not come before it."""
    for i, stage in enumerate(method.upload):
        for later in method.upload[i + 1 :]:
            if later.owner in stage.follows:
                raise Conflict(
                    f"{stage.owner!r} stands before {later.owner!r} in {method.text!r}, but must follow it; swap them"
                )
