"""FedAIMS's supervision sampling: the server gives each client of a round the block that it supervises."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedloom import rng
from fedloom.aggregators.similarity import (
    at_once,
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
from fedloom.uploads import unchanged

OWNER = "block_sampling"
BODIES = "bodies"
LATEST, USED = "latest:", "used:"
"""Begin the names of a client's vectors: the last one, and the one of the last refresh where similarities have a period."""


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
            index = _places(cohort.order)  # one that is not of the federation goes with its first
            chosen = {n: (index.get(n, 0) + cohort.round - 1) % groups + 1 for n in cohort.ids}
        else:
            if clustering:
                kept = LATEST if period == 1 else USED
                parts = unlike_groups(similarities([memory.get(f"{kept}{name}") for name in cohort.ids]), groups)
            else:
                draw = rng.stream(cohort.seed, "sample", "blocks", cohort.round)
                parts = dealt_groups(draw.permutation(len(cohort)).tolist(), groups)
            chosen = {cohort.ids[i]: block for block, part in enumerate(parts, start=1) for i in part}
        numbers = _numbers(groups, next(iter(cohort.leaves.values())).device)
        addressed = {name: {"block": numbers[block - 1]} for name, block in chosen.items()}
        return Prepared(memory=memory, addressed=addressed, keys=chosen)

    def learn(reduced: Message, memory: Leaves, cohort: Cohort) -> tuple[Message, Leaves]:
        moved = {n: reduced[BODIES][n] for n in _body(cohort.structure) if n in reduced[BODIES]}
        base = cohort.leaves if similarity == "raw" else None
        whole = at_once(moved)
        vectors = project(moved, cohort.seed, drawn=drawn, base=base, whole=whole).to(memory["facts"].dtype)
        apart = farthest(moved, reduced["delta"], whole)
        vectors = vectors.cpu()  # waits for the device
        # Each client's row is copied: a view would keep the rows of the whole cohort alive.
        made = {f"{LATEST}{name}": row.clone() for name, row in zip(cohort.ids, vectors, strict=True)}
        if period > 1 and cohort.round % period == 0:
            latest = {k: v for k, v in (memory | made).items() if k.startswith(LATEST)}
            made |= {USED + k.removeprefix(LATEST): v for k, v in latest.items()}
        facts = [apart.item(), *_spread(likeness(vectors.double()).numpy())]
        made["facts"] = torch.tensor(facts, dtype=memory["facts"].dtype)
        return {k: v for k, v in reduced.items() if k != BODIES}, memory | made

    def blank(facts: Facts) -> Leaves:
        like = next(v for v in facts.start.values() if v.is_floating_point())
        sent = facts.travelling()
        if not any(sent[n].numel() for n in _body(facts.structure) if n in sent):
            raise Conflict(
                f"'aims' cannot be stacked on {method.text!r}: it uploads no body whose likeness could be found"
            )
        return {"facts": torch.zeros(4, dtype=like.dtype)}  # of the host, as are clients' vectors: it groups them

    def report(memory: Leaves) -> dict[str, float]:
        return dict(
            zip(("kappa2", "similarity_min", "similarity", "similarity_max"), memory["facts"].tolist(), strict=True)
        )

    stage = Stage(owner=OWNER, fn=unchanged, also={BODIES: ("delta", stack())})
    keeping = (ServerStage(owner=OWNER, fn=learn, memory=blank, report=report),)
    return method.adding(
        stages=(stage,) if clustering else (),
        prepare=(Prepare(owner=OWNER, fn=give, told="block"),),
        server=keeping if clustering else (),
    )


def block_of(seen: Seen) -> Tensor:
    """The block of the client as a tensor."""
    return seen.addressed[OWNER]["block"]


def similarities(vectors: Sequence[Tensor | None]) -> np.ndarray:
    """Cosines of all pairs of clients by their vectors (clients x clients), 0 for clients that have none.

    Example:
        >>> similarities([torch.tensor([3.0, 0.0]), None, torch.tensor([3.0, 4.0])]).tolist()
        [[1.0, 0.0, 0.6], [0.0, 0.0, 0.0], [0.6, 0.0, 1.0]]
    """
    width = next((len(v) for v in vectors if v is not None), 0)
    rows = np.zeros((len(vectors), width))
    for row, vector in zip(rows, vectors, strict=True):
        if vector is not None:
            row[:] = vector.double().cpu().numpy()  # on a GPU after a CPU run was resumed on it
    return cosines(rows @ rows.T)


@lru_cache(maxsize=4)
def _numbers(blocks: int, device: torch.device) -> tuple[Tensor, ...]:
    """The numbers of the blocks on a device."""
    with torch.inference_mode(False):  # they are for everybody who comes later
        return torch.arange(1, blocks + 1).to(device).unbind()


@lru_cache(maxsize=4)
def _places(order: tuple[str, ...]) -> dict[str, int]:
    return {name: i for i, name in enumerate(order)}


def _body(structure: Structure) -> tuple[str, ...]:
    return tuple(i.name for i in structure.leaves if i.trainable and not i.owner and i.role == "body")


def _spread(similarity: np.ndarray) -> tuple[float, float, float]:
    """The least, mean and largest similarity of two clients; zeros where there is one only."""
    pairs = similarity[_above(len(similarity))].round(10)
    if not pairs.size:
        return (0.0, 0.0, 0.0)
    least, total, most = (float(of.reduce(pairs)) for of in (np.minimum, np.add, np.maximum))
    return least, total / pairs.size, most


@lru_cache(maxsize=4)
def _above(clients: int) -> tuple[np.ndarray, ...]:
    return np.triu_indices(clients, 1)
