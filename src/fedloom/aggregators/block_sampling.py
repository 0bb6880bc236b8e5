"""FedAIMS's supervision sampling: the server gives each client of a round the block that it supervises."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedloom import rng
from fedloom.aggregators.similarity import (
    CHUNK,
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
from fedloom.transfer import Array
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
    drawn, alike = lru_cache(maxsize=1)(coordinates), Alike()

    def give(memory: Leaves, cohort: Cohort) -> Prepared:
        groups = len(places(cohort.structure))
        if not groups:
            return Prepared(memory=memory)
        if assign == "round_robin":
            index = _places(cohort.order)  # one that is not of the federation goes with its first
            chosen = {n: (index.get(n, 0) + cohort.round - 1) % groups + 1 for n in cohort.ids}
        else:
            if clustering:
                memory = _named(_of_the_host(memory), cohort.order)
                kept = LATEST if period == 1 else USED
                parts = unlike_groups(alike.of([memory.get(f"{kept}{name}") for name in cohort.ids]), groups)
            else:
                draw = rng.stream(cohort.seed, "sample", "blocks", cohort.round)
                parts = dealt_groups(draw.permutation(len(cohort)).tolist(), groups)
            chosen = {cohort.ids[i]: block for block, part in enumerate(parts, start=1) for i in part}
        numbers = _numbers(groups, next(iter(cohort.leaves.values())).device)
        told = {name: {"block": numbers[block - 1]} for name, block in chosen.items()}
        return Prepared(memory=memory, addressed=told, keys=chosen)

    def learn(reduced: Message, memory: Leaves, cohort: Cohort) -> tuple[Message, Leaves]:
        moved = {n: reduced[BODIES][n] for n in _body(cohort.structure) if n in reduced[BODIES]}
        base = cohort.leaves if similarity == "raw" else None
        whole = at_once(moved)
        vectors = project(moved, cohort.seed, drawn=drawn, base=base, whole=whole).to(memory["facts"].dtype)
        found, apart = likeness(vectors.double()), farthest(moved, reduced["delta"], whole)
        asked = {"vectors": vectors, "likeness": found, "apart": apart}
        return {**{k: v for k, v in reduced.items() if k != BODIES}, "asked": asked}, memory

    def keep(memory: Leaves, told: Mapping[str, Array], cohort: Cohort) -> Leaves:
        kind = memory["facts"].dtype
        # Copied one by one: a view would keep those of the whole cohort for as long as one is kept.
        rows = zip(cohort.ids, told["vectors"], strict=True)
        made = {f"{LATEST}{name}": torch.from_numpy(row.copy()).to(kind) for name, row in rows}
        if period > 1 and cohort.round % period == 0:
            made |= {USED + k.removeprefix(LATEST): v for k, v in (memory | made).items() if k.startswith(LATEST)}
        facts = [float(told["apart"]), *_spread(told["likeness"])]
        return made | {"facts": torch.tensor(facts, dtype=kind)}

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

    stage = Stage(owner=OWNER, fn=unchanged, also={BODIES: ("delta", stack())}, stacked=True)
    keeping = (ServerStage(owner=OWNER, fn=learn, memory=blank, decide=keep, report=report),)
    return method.adding(
        stages=(stage,) if clustering else (),
        prepare=(Prepare(owner=OWNER, fn=give, told="block", ahead=clustering),),
        server=keeping if clustering else (),
    )


def block_of(seen: Seen) -> Tensor:
    """The block of the client as a tensor."""
    return seen.addressed[OWNER]["block"]


class Alike:
    """Pairwise similarity of clients by their vectors, 0 for clients that have none.

    Inner products are remembered: those of clients that come again with the very same tensors are not made anew. Runs in several threads may
    share it.
    """

    def __init__(self) -> None:
        self._one_at_a_time = threading.Lock()
        self._begin(0, 0)

    def _begin(self, clients: int, width: int) -> None:
        """Nobody is known."""
        self._held: list[Tensor | None] = [None] * clients
        self._rows = np.zeros((clients, width))
        self._products = self._found = np.zeros((clients, clients))

    def of(self, vectors: Sequence[Tensor | None]) -> np.ndarray:
        """The similarities (clients x clients), which the caller leaves as they are."""
        with self._one_at_a_time:
            return self._of(vectors)

    def _of(self, vectors: Sequence[Tensor | None]) -> np.ndarray:
        width = next((len(v) for v in vectors if v is not None), 0)
        if self._rows.shape != (len(vectors), width):
            self._begin(len(vectors), width)
        new = [i for i, (here, held) in enumerate(zip(vectors, self._held, strict=True)) if here is not held]
        if new:
            self._held = list(vectors)
            self._learn(new)
        found = self._found
        if self._rows.size > CHUNK:  # of a whole population: too much to be kept until it comes again
            self._begin(0, 0)
        return found

    def _learn(self, new: Sequence[int]) -> None:
        """Similarities with the vectors of some clients as they are now."""
        rows, products = self._rows, self._products
        for i in new:
            own = self._held[i]
            rows[i] = 0.0 if own is None else _of_numpy(own)
        products[new] = rows[new] @ rows.T
        products[:, new] = products[new].T
        self._found = cosines(products)


def _of_numpy(vector: Tensor) -> np.ndarray:
    """A vector as numpy has it, which lacks bfloat16: torch would wake all its threads for ones as short as these."""
    return (vector.float() if vector.dtype is torch.bfloat16 else vector).numpy()


def _of_the_host(memory: Leaves) -> Leaves:
    """The memory where clients are grouped; a checkpoint brings it back where all else is."""
    return memory if memory["facts"].is_cpu else {name: value.cpu() for name, value in memory.items()}


@lru_cache(maxsize=4)
def _numbers(blocks: int, device: torch.device) -> tuple[Tensor, ...]:
    """The numbers of the blocks on a device."""
    with torch.inference_mode(False):  # they are for everybody who comes later
        return torch.arange(1, blocks + 1).to(device).unbind()


def _named(memory: Leaves, order: Sequence[str]) -> Leaves:
    """Vectors by client; folders of earlier runs hold them as rows of a matrix, beside which stands who is known."""
    if "latest" not in memory:
        return memory
    made = {"facts": memory["facts"]}
    for begin, flags in ((LATEST, "known"), (USED, "used_known")):
        if flags in memory:
            rows = zip(order, memory[begin[:-1]], memory[flags].tolist(), strict=False)  # none before the first refresh
            made |= {f"{begin}{name}": row.clone() for name, row, known in rows if known}
    return made


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
