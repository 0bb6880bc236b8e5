"""The vocabulary of the five slots: what terms, rules, phases, stages and programs are."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from torch import Tensor

from fedloom.spec.leaves import Facts, Kind
from fedloom.spec.optimizer import Optimizer
from fedloom.spec.reducers import Reducer
from fedloom.spec.seen import Cohort, ReceiveRule, Seen
from fedloom.spec.structure import Pattern, Structure, TapChooser
from fedloom.tensors import Leaves, Memory, Message

# Slot 1: objective ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Term:
    """One summand of the local objective, written for one client.

    Args:
        owner: the recipe or plug-in that brings it.
        fn: ``(view, batch, seen) -> scalar``; with ``carry`` set, ``(view, batch, seen, carry) -> (scalar, carry)``.
        role: ``"data"`` for the term that fits the data (a method has one owner of it), ``"add"`` for the rest.
        phases: names of the phases it enters, or a test ``(phase, structure) -> bool``; None for all.
        copy: the copy of the model whose phases it enters; None for any.
        taps: modules whose outputs it reads (``view.tapped(owner)``), ``"z"`` being the head's input.
        carry: initial value of a state that lives within a phase, ``(structure) -> dict of tensors``.
    """

    owner: str
    fn: Callable[..., Any]
    role: Literal["data", "add"] = "add"
    phases: tuple[str, ...] | Callable[[Phase, Structure], bool] | None = None
    copy: str | None = "main"
    taps: TapChooser = ()
    carry: Callable[[Structure], Leaves] | None = None

    def enters(self, phase: Phase, structure: Structure) -> bool:
        """Whether the term is part of the objective of a phase."""
        here, named = self.copy in (None, phase.copy), self.phases
        return here and (named is None or (named(phase, structure) if callable(named) else phase.name in named))


# Slot 2: partition ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """Gives the leaves that match a pattern a kind.

    Args:
        owner: who claims the leaves; two owners may not claim one leaf.
        pattern: which leaves.
        kind: how they travel from now on.
        only: claims only leaves that are of this kind so far (``map_prior`` turns shared into mirrored).
        optional: a pattern that matches nothing is a warning instead of an error; with ``only``, not even that.
    """

    owner: str
    pattern: Pattern
    kind: Kind
    only: Kind | None = None
    optional: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """A second model of each client, with leaves of its own (``name/leaf``), all of one kind."""

    owner: str
    name: str
    kind: Kind = "personal"


@dataclass(frozen=True, kw_only=True, slots=True)
class Extra:
    """Leaves that a plug-in brings (``owner:leaf``): adapters, a personal bias, learnt weights.

    Args:
        owner: the plug-in; prefix of the leaves' names.
        build: ``(structure, generator) -> initial values``.
        kind: how they travel.
        role: whether phases for ``"head"`` or ``"body"`` train them; ``"none"`` for phases that name them only.
        resolved: ``(structure) -> facts``: what its options came to for this model, for ``run.toml`` (``resolved``, owner's name).
        key: ``(leaf) -> static key`` of the clients that train it; None for leaves that all clients train.
    """

    owner: str
    build: Callable[[Structure, np.random.Generator], Leaves]
    kind: Kind = "shared"
    role: Literal["head", "body", "none"] = "body"
    resolved: Callable[[Structure], Mapping[str, Any]] | None = None
    key: Callable[[str], int] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """Which leaves are shared and which are personal, and what else a client's model is made of.

    Args:
        rules: applied in order to every leaf; a leaf that no rule names is ``base``.
        base: kind of the leaves that no rule names.
        copies: further copies of the model.
        extras: leaves that plug-ins bring.
        receive: changes the start of a round after the plain rule; None for the plain rule.
        gated: leaves whose sharing the server switches from round to round (``server.gate``).
        rewrite: ``(z, leaves, seen) -> z`` at the head's input, in training and prediction.
    """

    rules: tuple[Rule, ...] = ()
    base: Kind = "shared"
    copies: tuple[Copy, ...] = ()
    extras: tuple[Extra, ...] = ()
    receive: ReceiveRule | None = None
    gated: Pattern | None = None
    rewrite: Callable[[Tensor, Leaves, Seen], Tensor] | None = None


# Slot 3: schedule -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampler:
    """How the rows of an epoch are ordered and grouped into steps.

    Args:
        order: ``(generator, labels) -> row indices`` of one epoch; None for a permutation of all rows.
        group: batches per step; 2 gives ``batch.pair``. A left-over batch is dropped; a lone one is halved.
        fraction: share of the rows that is drawn, once per phase.
    """

    order: Callable[[np.random.Generator, np.ndarray], np.ndarray] | None = None
    group: Literal[1, 2] = 1
    fraction: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Receive:
    """A client takes what the server sent: the beginning of a program.

    Args:
        plain: take the server's value of every leaf, personal ones too (to test the shared model).
        rule: whether the method's receive rule applies; False leaves kept leaves as the client last had them.
        mirrored: take the server's value of mirrored leaves too.
    """

    plain: bool = False
    rule: bool = True
    mirrored: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Send:
    """A client's upload stages run: the end of a program."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """One pass over the local rows, in order, that adds up a statistic.

    Args:
        name: where the result is found: ``seen.swept[name]``.
        fn: ``(view, batch, seen) -> dict of tensors``, summed over the batches.
        finish: ``(sums, seen) -> dict of tensors``, after the last batch; None keeps the sums.
        at: the leaves used: ``"now"``, ``"received"``, or ``(leaves, seen) -> leaves``.
        copy: the copy of the model.
        taps: as for terms.
        train: whether modules are in training mode.
        batch_size: rows of a batch, for statistics that are no sums over rows; ``"run"`` for the run's, ``"full"`` for all, None for any.
    """

    name: str
    fn: Callable[..., Leaves]
    finish: Callable[[Leaves, Seen], Leaves] | None = None
    at: Literal["now", "received"] | Callable[[Leaves, Seen], Leaves] = "now"
    copy: str = "main"
    taps: TapChooser = ()
    train: bool = False
    batch_size: int | Literal["run", "full"] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Judge:
    """The model as it is now, on rows that were not trained on: the task's statistics, under a name.

    Args:
        name: where the result is found in the reply.
        rows: which rows of the client.
        route: whether the method's own predict route is used, rather than the model's plain output.
    """

    name: str = "test"
    rows: Literal["test", "val", "train"] = "test"
    route: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """Gradient steps on some leaves.

    Args:
        name: its name; terms refer to it.
        leaves: which leaves move.
        copy: which copy of the model.
        epochs: passes over the rows; None for the run's.
        steps: mini-batches instead of epochs.
        stream: which random stream orders the rows; None for the copy's, so that a second copy never disturbs it.
        sampler: how rows are drawn.
        batch_size: None for the run's.
        optimizer: None for the run's.
        groups: optimisers of their own for some leaves, ``(pattern, optimizer)``.
        repeat: gradient steps on each batch.
        view: ``(leaves, seen) -> leaves``: the parameters as a function of the trained leaves.
        project: ``(leaves, seen) -> changed leaves``, after each gradient step.
        after: the same, once after each batch.
        eval_norm: normalisation layers (by pattern) that are in evaluation mode.
        until: ``(seen, losses, step) -> bool tensor``: the client goes on while it is true; ``losses`` are the last ten. False stays.
        thaw: whether leaves of the kind ``frozen`` move too (fine-tuning in an adapt program).
    """

    name: str = "main"
    leaves: Pattern = "all"
    copy: str = "main"
    epochs: int | None = None
    steps: int | None = None
    stream: str | None = None
    sampler: Sampler = field(default_factory=Sampler)
    batch_size: int | Literal["full"] | None = None
    optimizer: Optimizer | None = None
    groups: tuple[tuple[Pattern, Optimizer], ...] = ()
    repeat: int = 1
    view: Callable[[Leaves, Seen], Leaves] | None = None
    project: Callable[[Leaves, Seen], Leaves] | None = None
    after: Callable[[Leaves, Seen], Leaves] | None = None
    eval_norm: Pattern | None = None
    until: Callable[[Seen, Tensor, Tensor], Tensor] | None = None
    thaw: bool = False


Step = Receive | Sweep | Judge | Phase | Send
Program = tuple[Step, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """A client's work: three programs.

    Args:
        setup: once per client, before its first round.
        round: each time it takes part.
        adapt: before its model is evaluated or used; its result is discarded afterwards.
        server: after each round's stages, on ``Server.rows``; what its ``Send`` makes (stages with ``when="server"``) is added to the leaves.
        participation: ``"all"`` for methods that train every client in every round.
        setup_by: ``"all"``, or ``"one"`` for a setup that one client makes for all, drawn by the seed.
    """

    setup: Program = ()
    round: Program = (Receive(), Phase(), Send())
    adapt: Program = (Receive(),)
    server: Program = ()
    participation: Literal["all"] | None = None
    setup_by: Literal["all", "one"] = "all"


# Slot 4: upload -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One step of what a client does to its message, written for one client.

    Args:
        owner: the recipe or plug-in that brings it.
        fn: ``(message, memory, seen) -> (message, memory)``; ``memory`` is the owner's part.
        entries: entries that it adds, each with the reducer that the server applies.
        also: further reductions of an entry that is sent anyway: ``{new name: (entry, reducer)}``.
        memory: initial client memory of the owner, ``(facts) -> dict of tensors``.
        when: the program whose ``Send`` runs it.
        follows: owners whose stages must come earlier if they are present.
        wire: bytes that an entry takes on the wire, ``(entry) -> int``, where it is not sent as the tensors that the server works with.
    """

    owner: str
    fn: Callable[[Message, Leaves, Seen], tuple[Message, Leaves]]
    entries: Mapping[str, Reducer] = field(default_factory=dict)
    also: Mapping[str, tuple[str, Reducer]] = field(default_factory=dict)
    memory: Callable[[Facts], Leaves] | None = None
    when: Literal["round", "setup", "server"] = "round"
    follows: tuple[str, ...] = ()
    wire: Mapping[str, Callable[[Leaves], int]] = field(default_factory=dict)


# Slot 5: server -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """What a server stage gives out before a round.

    Args:
        memory: the owner's memory, new.
        broadcast: tensors for everybody (``seen.broadcast[owner]``).
        addressed: tensors for single clients (``seen.addressed[owner]``); all clients have the same names.
        keys: a key per client (``seen.key``), known on the host.
    """

    memory: Leaves
    broadcast: Leaves = field(default_factory=dict)
    addressed: Mapping[str, Leaves] = field(default_factory=dict)
    keys: Mapping[str, Hashable] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepare:
    """Runs before a round: ``(memory, cohort) -> Prepared``.

    Args:
        owner: the recipe or plug-in that brings it.
        fn: the stage.
        client_key: name of the addressed tensor that holds each client's key. Clients with different keys
            then share a wave, where ``seen.key`` is that tensor. Default: they run in separate waves.
    """

    owner: str
    fn: Callable[[Leaves, Cohort], Prepared]
    client_key: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerStage:
    """Runs after the reduce: ``(reduced, memory, cohort) -> (reduced, memory)``.

    ``reduced["delta"]`` is what is added to the server's leaves in the end. A leaf that is personal in this round (see
    ``Server.gate``) is zero there, its memory entries (``leaf`` or ``what/leaf``) go back to their initial values, and
    its own mean is added after all stages, or ``reduced["personal"]`` where a stage gives it.

    Args:
        owner: the recipe or plug-in that brings it.
        fn: the stage. It changes none of its arguments and keeps no state of its own: it is called a second time, without the
            reply, if a reply turns out not to be finite. It may read values on the host (``scores.tolist()``), once if possible.
        memory: initial server memory of the owner, ``(facts) -> dict of tensors``.
        when: the program after whose replies it runs.
        report: ``(memory) -> facts`` of the round (numbers, texts, lists, dictionaries), found in its record by the owner's name.
    """

    owner: str
    fn: Callable[[Message, Leaves, Cohort], tuple[Message, Leaves]]
    memory: Callable[[Facts], Leaves] | None = None
    when: Literal["round", "setup"] = "round"
    report: Callable[[Leaves], Mapping[str, Any]] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Server:
    """What the server does.

    Args:
        prepare: before a round.
        stages: after the reduce, in order.
        gate: ``(memory) -> {leaf: 0 or 1}``: which gated leaves are shared now.
        rows: ``(memory) -> (inputs, targets)``: rows that the server holds, for the program ``Schedule.server``.
    """

    prepare: tuple[Prepare, ...] = ()
    stages: tuple[ServerStage, ...] = ()
    gate: Callable[[Memory], Leaves] | None = None
    rows: Callable[[Memory], tuple[Tensor, Tensor]] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalRule:
    """Which model is a client's own at test time.

    Args:
        copy: the copy that is evaluated.
        predict: ``(view, seen) -> output``; None for the model's plain output.
        tested: ``(leaves, memory) -> leaves``: the shared model that is tested, where it is not the one sent.
        taps: as for terms, for ``predict``.
    """

    copy: str = "main"
    predict: Callable[..., Tensor] | None = None
    tested: Callable[[Leaves, Memory], Leaves] | None = None
    taps: TapChooser = ()
