"""Diagnostics of a run: what the theorems speak of, measured round by round where asked for."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from fedloom import rng, tensors
from fedloom.clients.messages import Site
from fedloom.clients.states import ServerState
from fedloom.network.bound_method import Bound
from fedloom.ops.gram import cosines, gram
from fedloom.rounds.diagnostics.gradients import Gradients, fitting_phase, measure, spread
from fedloom.rounds.run import Record, Run
from fedloom.rounds.server import Outcome
from fedloom.tensors import Leaves


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnostics:
    """What the papers' theorems speak of, measured in the run and recorded under ``diagnostics``; without the table nothing is.

    Args:
        every: rounds between measurements; the first round is always measured.
        clients: clients whose gradients are taken (a fixed seeded choice); drift and conflict are of the clients of the round.
        rows: most training rows of a client that are used for its gradient.
    """

    every: int = 1
    clients: int = 10
    rows: int = 1024

    BOUNDS: ClassVar[tuple[str, ...]] = ("every >= 1", "clients >= 1", "rows >= 2")


Found = dict[str, Any]


@dataclass(slots=True)
class Probe:
    """Measures a run around its rounds; it changes nothing in it.

    Args:
        options: when, and on how many clients and rows.
        cloud: the cloud's rows, in hybrid mode.
    """

    options: Diagnostics
    cloud: Site | None = None
    _replies: tuple[Bound, ServerState, Outcome] | None = None
    _ahead: tuple[int, Gradients | None] | None = field(default=None)

    def around(self, run: Run, round: int, play: Callable[[], Record]) -> Record:
        """Plays a round; its record has the key ``diagnostics`` where the round is one of those that are measured."""
        if round % self.options.every and round != 1:
            return play()
        before = self._gradients(run, round)
        run.watch = self._note
        try:
            record = play()
        finally:
            run.watch = None
        found: Found = {"lr": run.work.optimizer.lr_at(round, run.work.rounds)}
        if before is not None:
            found |= _at(before, run.at(round))
            if self.cloud is not None:
                found["cosine_cloud"] = self._cloud(run, before, round)
            after = self._gradients(run, round + 1)
            self._ahead = (round + 1, after)
            found["smoothness"] = None if after is None else _smoothness(before, after)
        if self._replies is not None:
            found |= _sent(*self._replies, run.state)
            self._replies = None
        return {**record, "diagnostics": found}

    def _note(self, bound: Bound, before: ServerState, outcome: Outcome) -> None:
        self._replies = (bound, before, outcome)

    def _gradients(self, run: Run, round: int) -> Gradients | None:
        if self._ahead is not None and self._ahead[0] == round:
            return self._ahead[1]
        ids, most = list(run.sites), self.options.clients
        if len(ids) > most:
            picked = rng.stream(run.work.seed, "sample", "diagnostics").choice(len(ids), size=most, replace=False)
            ids = [ids[i] for i in sorted(picked)]
        return measure(run, ids, round, self.options.rows)

    def _cloud(self, run: Run, sites: Gradients, round: int) -> float | None:
        """``cos(g_cloud, g_sites)`` of the gradients themselves, where the record's ``alignment`` is that of displacements."""
        found = measure(run, list(run.sites)[:1], round, self.options.rows, cloud=self.cloud)
        return None if found is None else _cosine(found.mean(), sites.mean())


def _exact(a: Leaves) -> Leaves:
    return {n: v.double() for n, v in a.items()}


def _norm(a: Leaves) -> float:
    return math.sqrt(float(tensors.square_norm(_exact(a))))


def _cosine(a: Leaves, b: Leaves) -> float | None:
    scale = _norm(a) * _norm(b)
    return max(-1.0, min(1.0, float(tensors.dot(_exact(a), _exact(b))) / scale)) if scale > 0 else None


def _ratio(a: float, b: float) -> float | None:
    return a / b if b > 0 else None


def _at(g: Gradients, bound: Bound) -> Found:
    """What gradients at the start of a round say."""
    middle, plain = g.mean(), tensors.weighted_sum(list(g.data), list(g.weights))
    square, square_plain = _norm(middle) ** 2, _norm(plain) ** 2
    whole, data = spread(g.whole, g.weights), spread(g.data, g.weights)
    layers = {
        layer: kept for layer, names in bound.structure.layers().items() if (kept := [n for n in names if n in middle])
    }
    found: Found = {
        "objective": g.loss,
        "gradient_norm": math.sqrt(square),
        "client_gradient_norm": sum(p * _norm(c) for p, c in zip(g.weights, g.whole, strict=True)),
        "heterogeneity": whole,
        "heterogeneity_relative": _ratio(whole, square),
        "noise": g.noise,
        "heterogeneity_by_layer": {layer: spread(g.whole, g.weights, names) for layer, names in layers.items()},
    }
    if any(a is not b for a, b in zip(g.whole, g.data, strict=True)):
        relative, before = _ratio(whole, square), _ratio(data, square_plain)
        by_layer = {layer: spread(g.data, g.weights, names) for layer, names in layers.items()}
        found |= {
            "heterogeneity_data": data,
            "kappa": _ratio(whole, data),
            "kappa_relative": None if relative is None or before is None else _ratio(relative, before),
            "kappa_by_layer": {k: _ratio(v, by_layer[k]) for k, v in found["heterogeneity_by_layer"].items()},
        }
    return found


def _smoothness(before: Gradients, after: Gradients) -> float | None:
    """``||g(w') - g(w)|| / ||w' - w||`` along the round: a lower estimate of L."""
    if set(before.point) != set(after.point):
        return None
    return _ratio(_norm(tensors.sub(after.mean(), before.mean())), _norm(tensors.sub(after.point, before.point)))


def _sent(bound: Bound, before: ServerState, outcome: Outcome, after: ServerState) -> Found:
    """What the clients' uploads say: drift, its spread, the jump at aggregation, conflict by layer."""
    chosen = fitting_phase(bound)
    replies = [r for r in outcome.accepted if "delta" in r.message]
    if chosen is None or not replies:
        return {}
    steps = [r.steps.get(chosen[0].phase.name, 0) for r in replies]
    names = [n for n in chosen[1] if all(n in r.message["delta"] for r in replies)]
    moves = [{n: r.message["delta"][n].double() for n in names} for r in replies]
    if not names:
        return {}
    jump = {n: (after.leaves[n] - before.leaves[n]).double() for n in names}
    square = [float(tensors.square_norm(m)) for m in moves]
    equal = [1 / len(moves)] * len(moves)
    found: Found = {
        "local_steps": sum(steps) / len(steps),
        "drift": sum(square) / len(square),
        "drift_max": max(square),
        "drift_spread": spread(moves, equal),
        "aggregation_jump": max(float(tensors.square_norm(tensors.sub(jump, m))) for m in moves),
    }
    conflict: dict[str, float] = {}
    cosine: dict[str, float] = {}
    for layer, leaves in bound.structure.layers().items():
        kept = [n for n in leaves if n in names]
        if kept and len(moves) > 1:
            pairs = _pair_cosines(torch.stack([torch.cat([m[n].reshape(-1) for n in kept]) for m in moves]))
            conflict[layer] = float((pairs < 0).double().mean())
            cosine[layer] = float(pairs.mean())
    return {**found, "conflict": conflict, "cosine": cosine}


def _pair_cosines(moves: torch.Tensor) -> torch.Tensor:
    """Cosines of all unordered pairs."""
    i, j = torch.triu_indices(len(moves), len(moves), offset=1, device=moves.device)
    return cosines(gram([moves]))[i, j]
