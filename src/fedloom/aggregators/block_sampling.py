"""FedAIMS's supervision sampling: the server gives each client of a round the block that it supervises."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedloom import rng, transfer
from fedloom.aggregators.similarity import (
    WIDTH,
    coordinates,
    cosines,
    dealt_groups,
    farthest,
    likeness,
    project,
    unlike_groups,
)
from fedloom.errors import Conflict
from fedloom.record import Method
from fedloom.reducers import stack
from fedloom.slots import Prepare, Prepared, ServerStage, Stage
from fedloom.structure import Structure
from fedloom.types import Cohort, Facts, Leaves, Message, Seen

OWNER = "block_sampling"
BODIES = "bodies"


def sampled(
    method: Method,
    places: Callable[[Structure], Sequence[object]],
    *,
    assign: Literal["cluster", "random", "round_robin"],
    similarity: Literal["raw", "delta"],
    period: int,
) -> Method:
    """The method with a block index b_k per client and round, found as ``seen.key`` and by :func:`block_of`.

    With ``assign="cluster"`` the server keeps one projection of each client's last uploaded body, and groups clients of a round
    that are unlike each other; larger groups get deeper blocks.

    Args:
        method: the method; what its clients upload as ``delta`` is used, nothing more is sent.
        places: the blocks that can be supervised.
        assign: Algorithm 2, at random, or in turn.
        similarity: cosine of bodies, or of what a round changed in them.
        period: rounds between updates of the similarity.

    Reference: FedAIMS, section 4.3 and Algorithm 2.
    """
    clustering = assign == "cluster"
    drawn = lru_cache(maxsize=1)(coordinates)

    def give(memory: Leaves, cohort: Cohort) -> Prepared:
        groups = len(places(cohort.structure))
        if not groups:
            return Prepared(memory=memory)
        if assign == "round_robin":
            chosen = {n: (max(i, 0) + cohort.round - 1) % groups + 1 for n, i in _indices(cohort).items()}
        else:
            if clustering:
                parts = unlike_groups(_similarity(memory, cohort), groups)
            else:
                draw = rng.stream(cohort.seed, "sample", "blocks", cohort.round)
                parts = dealt_groups(draw.permutation(len(cohort)).tolist(), groups)
            chosen = {cohort.ids[i]: block for block, part in enumerate(parts, start=1) for i in part}
        device = next(iter(cohort.leaves.values())).device
        numbers = transfer.onto(torch.tensor(list(chosen.values())), device).unbind()
        told = {name: {"block": number} for name, number in zip(chosen, numbers, strict=True)}
        return Prepared(memory=memory, addressed=told, keys=chosen)

    def learn(reduced: Message, memory: Leaves, cohort: Cohort) -> tuple[Message, Leaves]:
        moved = {n: reduced[BODIES][n] for n in _body(cohort.structure) if n in reduced[BODIES]}
        latest, known, clients = memory["latest"], memory["known"], len(cohort)
        base = cohort.leaves if similarity == "raw" else None
        vectors = project(moved, cohort.seed, drawn=drawn, base=base).to(latest.dtype)
        alike = likeness(vectors)
        asked = torch.cat([farthest(moved, reduced["delta"])[None], alike.flatten(), vectors.flatten().double()])
        where = torch.tensor(list(_indices(cohort).values()), device=latest.device)
        if not known.numel():
            latest, known = latest.new_zeros(cohort.population, latest.shape[1]), known.new_zeros(cohort.population)
        latest, known = latest.clone(), known.index_fill(0, where, 1.0)
        # All that can be done without the device's answer has been done; the rest is of the host, which groups clients.
        apart, pairs, ended = asked.cpu().split([1, clients**2, vectors.numel()])
        latest.index_copy_(0, where, ended.view(clients, -1).to(latest))
        facts = [float(apart), *_spread(pairs.view(clients, clients).numpy())]
        memory = {**memory, "latest": latest, "known": known, "facts": torch.tensor(facts).to(memory["facts"])}
        if period > 1 and cohort.round % period == 0:
            memory |= {"used": latest, "used_known": known}
        return {k: v for k, v in reduced.items() if k != BODIES}, memory

    def blank(facts: Facts) -> Leaves:
        like = next(v for v in facts.start.values() if v.is_floating_point())
        sent = facts.travelling()
        width = min(sum(sent[n].numel() for n in _body(facts.structure) if n in sent), WIDTH)
        if not width:
            raise Conflict(
                f"'aims' cannot be stacked on {method.text!r}: it uploads no body whose likeness could be found"
            )
        shapes = {"latest": (0, width), "known": (0,), "facts": (4,)}
        # Of the host, which groups clients by them and reports them.
        empty = {k: torch.zeros(shape, dtype=like.dtype) for k, shape in shapes.items()}
        return empty if period == 1 else empty | {"used": empty["latest"], "used_known": empty["known"]}

    def report(memory: Leaves) -> dict[str, float]:
        return dict(
            zip(("kappa2", "similarity_min", "similarity", "similarity_max"), memory["facts"].tolist(), strict=True)
        )

    stage = Stage(owner=OWNER, fn=lambda message, memory, seen: (message, memory), also={BODIES: ("delta", stack())})
    keeping = (ServerStage(owner=OWNER, fn=learn, memory=blank, report=report),)
    return method.adding(
        stages=(stage,) if clustering else (),
        prepare=(Prepare(owner=OWNER, fn=give, told="block"),),
        server=keeping if clustering else (),
    )


def block_of(seen: Seen) -> Tensor:
    """The block of the client as a tensor."""
    return seen.addressed[OWNER]["block"]


def _similarity(memory: Leaves, cohort: Cohort) -> np.ndarray:
    """Pairwise similarity of the cohort's clients from the last refresh; 0 for clients that are not known."""
    vectors, known = memory.get("used", memory["latest"]), memory.get("used_known", memory["known"])
    if not known.numel():
        return np.zeros((len(cohort), len(cohort)))
    places = list(_indices(cohort).values())
    rows = torch.tensor(places, device=known.device)
    flags = known[rows]  # those of the federation's last client for one that is not of it
    return cosines(vectors[rows], flags if min(places) >= 0 else flags * (rows >= 0))


def _indices(cohort: Cohort) -> dict[str, int]:
    """Where the clients of a round stand in the federation; -1 for one that is not of it."""
    index = _places(cohort.order)
    return {name: index.get(name, -1) for name in cohort.ids}


@lru_cache(maxsize=4)
def _places(order: tuple[str, ...]) -> dict[str, int]:
    return {name: i for i, name in enumerate(order)}


def _body(structure: Structure) -> tuple[str, ...]:
    return tuple(i.name for i in structure.leaves if i.trainable and not i.owner and i.role == "body")


def _spread(similarity: np.ndarray) -> tuple[float, float, float]:
    """The least, mean and largest similarity of two clients; zeros where there is one only."""
    pairs = similarity[_above(len(similarity))].round(10)
    return (float(pairs.min()), float(pairs.mean()), float(pairs.max())) if pairs.size else (0.0, 0.0, 0.0)


@lru_cache(maxsize=4)
def _above(clients: int) -> tuple[np.ndarray, ...]:
    return np.triu_indices(clients, 1)
