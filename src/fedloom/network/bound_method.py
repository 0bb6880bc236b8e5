"""A method bound to a model and a task: every pattern resolved, every conflict found, before round one."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from fedloom import rng
from fedloom.errors import Conflict, UserError
from fedloom.network.functional import Network
from fedloom.spec.leaves import Facts, Kind, LeafSpec
from fedloom.spec.method import Method
from fedloom.spec.optimizer import Optimizer
from fedloom.spec.parts import Phase, Sweep, Term
from fedloom.spec.seen import TapName
from fedloom.spec.structure import LeafInfo, Pattern, Structure, TapChooser, matches
from fedloom.tasks import Task
from fedloom.tensors import Leaves, Memory


@dataclass(frozen=True, slots=True)
class BoundPhase:
    """A phase with its patterns resolved."""

    phase: Phase
    terms: tuple[Term, ...]
    trained: tuple[str, ...]
    groups: tuple[tuple[tuple[str, ...], Optimizer | None], ...]
    taps: Mapping[str, tuple[TapName, ...]]
    still: frozenset[str]


@dataclass(frozen=True, slots=True, eq=False)
class Bound:
    """A method, a network and a task that fit together.

    Args:
        method: the record.
        network: the user's model as a function.
        task: what is predicted.
        structure: of the model, with the leaves that plug-ins brought.
        specs: every leaf by its full name.
        start: the leaves before round one.
        phases: the phases of all programs, by name.
        locals: per copy, pairs (name within the copy, full name).
        memory: memory of a client that has never taken part.
        server_memory: the server's memory before round one.
    """

    method: Method
    network: Network
    task: Task
    structure: Structure
    specs: Mapping[str, LeafSpec]
    start: Leaves
    phases: Mapping[str, BoundPhase]
    locals: Mapping[str, tuple[tuple[str, str], ...]]
    memory: Memory
    server_memory: Memory

    def of_copy(self, leaves: Leaves, copy: str) -> Leaves:
        """The leaves of a copy by their names within it."""
        if copy == "main" and len(self.locals) == 1:
            return leaves
        return {local: leaves[full] for local, full in self.locals[copy]}

    def taps(self, chooser: TapChooser) -> tuple[TapName, ...]:
        """The modules that a term, a sweep or a predict route reads."""
        return resolve_taps(chooser, self.structure)

    def split(self, leaves: Leaves) -> dict[Kind, Leaves]:
        """Leaves by kind; :meth:`merge` is the exact inverse. A leaf that no rule covers is an error."""
        parts: dict[Kind, Leaves] = {"shared": {}, "personal": {}, "mirrored": {}, "frozen": {}}
        for name, value in leaves.items():
            if name not in self.specs:
                raise UserError(f"the leaf {name!r} is not one of the bound model's: {', '.join(self.specs)}")
            parts[self.specs[name].kind][name] = value
        return parts

    def merge(self, parts: Mapping[Kind, Leaves]) -> Leaves:
        """One dictionary again, in the model's order."""
        found = {name: value for part in parts.values() for name, value in part.items()}
        return {name: found[name] for name in self.specs if name in found}

    @property
    def client_key(self) -> tuple[str, str] | None:
        """Owner and name of the addressed tensor that holds the clients' keys, or None."""
        stages = self.method.server.prepare
        return next(((p.owner, p.client_key) for p in stages if p.client_key is not None), None)

    def complete(self) -> bool:
        """Whether the server's leaves alone make a whole model."""
        return all(s.kind != "personal" or s.owner for s in self.specs.values() if s.copy == "main")

    def uniform(self) -> bool:
        """Whether every client's own model is the server's, so that one test serves both."""
        method = self.method
        simple = method.partition.receive is None and method.evaluate.predict is None
        plain = len(method.schedule.adapt) == 1 and method.evaluate.copy == "main" and method.partition.rewrite is None
        return simple and plain and not any(s.kept for s in self.specs.values() if s.copy == "main" and not s.owner)


def resolve_taps(chooser: TapChooser, structure: Structure) -> tuple[TapName, ...]:
    """The names behind a tuple of names or a function of the structure."""
    return chooser(structure) if callable(chooser) else chooser


def bind(method: Method, network: Network, task: Task, *, seed: int = 0) -> Bound:
    """Resolves a method against a model.

    Raises:
        UserError: a pattern that matches nothing, a phase that trains nothing, a task that the method cannot serve.
        Conflict: two owners that claim one leaf.
    """
    if method.tasks is not None and task.name not in method.tasks:
        dense = ": it is defined by one label and one feature vector per row" if task.name == "segmentation" else ""
        raise UserError(
            f"{method.text!r} is for {' and '.join(method.tasks)}, but the task is {task.name!r}{dense}; "
            "choose another method (fedloom list methods)"
        )
    extras = _build_extras(method, network, seed)
    structure = replace(network.structure, leaves=network.structure.leaves + tuple(i for i, _, _ in extras.values()))
    values = dict(network.start) | {name: value for name, (_, _, value) in extras.items()}
    kinds = _resolve_kinds(method, structure, {name: kind for name, (_, kind, _) in extras.items()})
    specs, start, locals_ = _resolve_leaves(method, structure, kinds, values)
    specs, phases = _resolve_phases(method, structure, specs)
    wanted = {t for p in phases.values() for taps in p.taps.values() for t in taps}
    sweeps = [
        s
        for program in ("setup", "round", "adapt", "server")
        for s in getattr(method.schedule, program)
        if isinstance(s, Sweep)
    ]
    for chooser in [*(s.taps for s in sweeps), method.evaluate.taps]:
        wanted |= set(resolve_taps(chooser, structure))
    if method.partition.rewrite is not None:
        wanted.add("z")
    network.want(frozenset(t if isinstance(t, str) else t.name for t in wanted))
    facts = Facts(structure, specs, start)
    memory = {s.owner: s.memory(facts) for s in method.upload if s.memory is not None}
    kept = {s.owner: s.memory(facts) for s in method.server.stages if s.memory is not None}
    return Bound(method, network, task, structure, specs, start, phases, locals_, memory, kept)


Extras = dict[str, tuple[LeafInfo, Kind, torch.Tensor]]


def _build_extras(method: Method, network: Network, seed: int) -> Extras:
    made: Extras = {}
    device = next(iter(network.start.values())).device
    for extra in method.partition.extras:
        generator = rng.stream(seed, "adapters", extra.owner)
        for name, value in extra.build(network.structure, generator).items():
            full = f"{extra.owner}:{name}"
            if full in made:
                raise Conflict(f"{extra.owner!r} brings the leaf {full!r} twice; a plug-in can be stacked once")
            value = value.to(device)
            value = value.to(network.structure.dtype) if value.is_floating_point() else value
            kind = "personal" if method.partition.base == "personal" and extra.kind == "shared" else extra.kind
            info = LeafInfo(
                full,
                extra.owner,
                value.is_floating_point(),
                False,
                False,
                extra.role,
                value.shape,
                extra.owner,
                None if extra.key is None else extra.key(name),
            )
            made[full] = (info, kind, value)
    return made


def _resolve_kinds(method: Method, structure: Structure, extras: Mapping[str, Kind]) -> dict[str, Kind]:
    kinds: dict[str, Kind] = {i.name: extras.get(i.name, method.partition.base) for i in structure.leaves}
    owner_of: dict[str, str] = {}
    for rule in method.partition.rules:
        hit = [i for i in structure.leaves if matches(rule.pattern, i)]
        if rule.only is not None:
            hit = [i for i in hit if kinds[i.name] == rule.only]
        if not hit and not (rule.optional and rule.only is not None):
            _missed(rule.owner, rule.pattern, structure, optional=rule.optional)
        for info in hit:
            if rule.only is None and owner_of.get(info.name, rule.owner) != rule.owner:
                raise Conflict(
                    f"{rule.owner!r} cannot be stacked on {owner_of[info.name]!r}: both decide whether {info.name!r} is shared"
                )
            owner_of[info.name] = rule.owner
            kinds[info.name] = rule.kind
    for info in structure.leaves:
        if not info.trainable and not info.buffer:
            kinds[info.name] = "frozen"
    return kinds


def _missed(owner: str, pattern: Pattern, structure: Structure, *, optional: bool) -> None:
    names = ", ".join(i.name for i in structure.leaves[:12])
    what = f"{owner}: the pattern {pattern!r} matches no leaf of the model"
    if optional:
        warnings.warn(f"{what}, so it changes nothing here", stacklevel=2)
        return
    if pattern == "head":
        last = ", ".join(list(structure.layers())[-5:])
        raise UserError(f"{owner}: the model's head was not found; name it with head='...' (last layers: {last})")
    raise UserError(f"{what}; leaves are {names}{' ...' if len(structure.leaves) > 12 else ''}")


def _resolve_leaves(
    method: Method, structure: Structure, kinds: Mapping[str, Kind], values: Leaves
) -> tuple[dict[str, LeafSpec], Leaves, dict[str, tuple[tuple[str, str], ...]]]:
    specs: dict[str, LeafSpec] = {}
    start: Leaves = {}
    locals_: dict[str, tuple[tuple[str, str], ...]] = {}
    gated = method.partition.gated
    copies: list[tuple[str, Kind | None]] = [
        ("main", None),
        *((c.name, c.kind) for c in method.partition.copies),
    ]
    for copy, kind in copies:
        if copy in locals_:
            raise Conflict(f"two parts of {method.text!r} each keep a copy of the model named {copy!r}")
        pairs = []
        for info in structure.leaves:
            full = info.name if copy == "main" else f"{copy}/{info.name}"
            own = kinds[info.name]
            specs[full] = LeafSpec(
                name=full,
                local=info.name,
                copy=copy,
                kind=own if kind is None or own == "frozen" else kind,
                trainable=info.trainable,
                buffer=info.buffer,
                floating=values[info.name].is_floating_point(),
                owner=info.owner,
                gated=copy == "main" and gated is not None and own == "shared" and matches(gated, info),
                key=info.key,
            )
            start[full] = values[info.name] if copy == "main" else values[info.name].clone()
            pairs.append((info.name, full))
        locals_[copy] = tuple(pairs)
    return specs, start, locals_


def _resolve_phases(
    method: Method, structure: Structure, specs: dict[str, LeafSpec]
) -> tuple[dict[str, LeafSpec], dict[str, BoundPhase]]:
    infos = {i.name: i for i in structure.leaves}
    found: dict[str, BoundPhase] = {}
    for program in ("setup", "round", "adapt", "server"):
        for phase in method.phases(program):
            of_copy = [s for s in specs.values() if s.copy == phase.copy and s.trainable]
            movable = [s for s in of_copy if s.kind != "frozen" or phase.thaw]
            trained = tuple(s.name for s in movable if matches(phase.leaves, infos[s.local]))
            if not trained:
                _missed(f"{method.text}, phase {phase.name!r}", phase.leaves, structure, optional=False)
            previous = found.get(phase.name)
            if previous is not None and previous.phase != phase:
                raise Conflict(f"{method.text!r} has two different phases named {phase.name!r}")
            terms = tuple(t for t in method.objective if t.enters(phase, structure))
            taps: dict[str, tuple[TapName, ...]] = {}
            for term in terms:
                taps[term.owner] = taps.get(term.owner, ()) + resolve_taps(term.taps, structure)
            found[phase.name] = BoundPhase(
                phase=phase,
                terms=terms,
                trained=trained,
                groups=_groups(phase, trained, specs, infos),
                taps=taps,
                still=_still(phase, structure),
            )
            if program == "round":
                for name in trained:
                    specs[name] = replace(specs[name], phases=(*specs[name].phases, phase.name))
    return specs, found


def _groups(
    phase: Phase, trained: tuple[str, ...], specs: Mapping[str, LeafSpec], infos: Mapping[str, LeafInfo]
) -> tuple[tuple[tuple[str, ...], Optimizer | None], ...]:
    left = list(trained)
    groups: list[tuple[tuple[str, ...], Optimizer | None]] = []
    for pattern, optimizer in phase.groups:
        hit = tuple(n for n in left if matches(pattern, infos[specs[n].local]))
        left = [n for n in left if n not in hit]
        if hit:
            groups.append((hit, optimizer))
    return (*groups, (tuple(left), phase.optimizer)) if left else tuple(groups)


def _still(phase: Phase, structure: Structure) -> frozenset[str]:
    if phase.eval_norm is None:
        return frozenset()
    return frozenset(i.module for i in structure.leaves if i.norm and matches(phase.eval_norm, i))
