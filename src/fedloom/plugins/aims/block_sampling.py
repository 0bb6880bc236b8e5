"""Supervision sampling of FedAIMS: each client of a round supervises one intermediate block.

The code uses the symbols of the paper (section 4.3, Algorithms 1 and 2):

    m        blocks of the network; the blocks 1 .. m-1 can be supervised
    phi_i    body that client i uploaded last, of which the server stores a random projection
    s        s_ij = cos(phi_i, phi_j)
    G_k      clients that supervise block k
    b_i      block of client i
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedloom import rng
from fedloom.devices import to_device_async
from fedloom.errors import Conflict
from fedloom.ops.gram import cosines, gram
from fedloom.ops.similarity import dealt_groups, farthest, project, unlike_groups
from fedloom.spec.leaves import Facts
from fedloom.spec.method import Method
from fedloom.spec.parts import Prepare, Prepared, ServerStage, Stage
from fedloom.spec.reducers import stack
from fedloom.spec.seen import Cohort
from fedloom.spec.structure import Structure
from fedloom.spec.uploads import unchanged
from fedloom.tensors import Leaves, Message

OWNER = "block_sampling"
BODIES = "bodies"
LATEST, USED = "latest:", "used:"
"""Prefixes of a client's memory entries: its last projection, and that of the last update of s."""


def sampled(
    method: Method,
    blocks: Callable[[Structure], Sequence[object]],
    *,
    assign: Literal["cluster", "random", "round_robin"],
    similarity: Literal["raw", "delta"],
    period: int,
) -> Method:
    """Add the supervision sampling to a method. Client code asks ``seen.selects(j)``.

    Args:
        method: the method; the server uses what clients upload as ``delta``, nothing more is sent.
        blocks: the blocks 1 .. m-1 of a network.
        assign: Algorithm 2, at random, or in turn.
        similarity: cosine of bodies, or of what a round changed in them.
        period: rounds between updates of s.

    Reference: FedAIMS, section 4.3 and Algorithm 2.
    """
    sampling = _Sampling(method.text, blocks, assign, similarity, period)
    method = method.adding(prepare=(Prepare(owner=OWNER, fn=sampling.allocate, client_key="block"),))
    if assign != "cluster":
        return method
    update = ServerStage(owner=OWNER, fn=sampling.update, memory=sampling.memory, report=sampling.report)
    bodies = Stage(owner=OWNER, fn=unchanged, also={BODIES: ("delta", stack())})
    return method.adding(stages=(bodies,), server=(update,))


@dataclass(frozen=True, slots=True)
class _Sampling:
    """The options of :func:`sampled`, and the server's two steps."""

    method: str
    blocks: Callable[[Structure], Sequence[object]]
    assign: str
    similarity: str
    period: int

    def allocate(self, memory: Leaves, cohort: Cohort) -> Prepared:
        """Algorithm 1, line 4: allocate a block b_i to each client of the round."""
        groups = len(self.blocks(cohort.structure))
        if not groups:
            return Prepared(memory=memory)
        if self.assign == "round_robin":
            index = {i: number for number, i in enumerate(cohort.order)}
            # A client that is not of the federation goes with the first one.
            b = {i: (index.get(i, 0) + cohort.round - 1) % groups + 1 for i in cohort.ids}
        else:
            G = self.groups(memory, cohort, groups)
            b = {cohort.ids[i]: k for k, G_k in enumerate(G, start=1) for i in G_k}
        device = next(iter(cohort.leaves.values())).device
        numbers = to_device_async(torch.arange(1, groups + 1), device).unbind()
        addressed = {i: {"block": numbers[b_i - 1]} for i, b_i in b.items()}
        return Prepared(memory=memory, addressed=addressed, keys=b)

    def groups(self, memory: Leaves, cohort: Cohort, groups: int) -> list[list[int]]:
        """Return G_1 .. G_(m-1), lists of positions in the cohort, the smallest first."""
        if self.assign == "random":
            draw = rng.stream(cohort.seed, "sample", "blocks", cohort.round)
            return dealt_groups(draw.permutation(len(cohort)).tolist(), groups)
        prefix = LATEST if self.period == 1 else USED
        s = similarities([memory.get(f"{prefix}{i}") for i in cohort.ids])
        return unlike_groups(s, groups)

    def update(self, reduced: Message, memory: Leaves, cohort: Cohort) -> tuple[Message, Leaves]:
        """Algorithm 1, line 17: update the similarities with the uploaded bodies.

        The server stores one projection per client; :func:`similarities` computes s when it is used.
        """
        deltas = {n: reduced[BODIES][n] for n in _body(cohort.structure) if n in reduced[BODIES]}
        base = cohort.leaves if self.similarity == "raw" else None
        dtype = memory["facts"].dtype
        phi = project(deltas, cohort.seed, base=base).to(dtype)
        kappa2, s = farthest(deltas, reduced["delta"]), cosines(gram([phi]))
        phi = phi.cpu()  # waits for the device, where all the rest is queued
        # Clone each row: a view would keep the rows of the whole cohort alive.
        latest = {f"{LATEST}{i}": phi_i.clone() for i, phi_i in zip(cohort.ids, phi, strict=True)}
        memory = memory | latest
        if self.period > 1 and cohort.round % self.period == 0:
            memory |= {USED + n.removeprefix(LATEST): v for n, v in memory.items() if n.startswith(LATEST)}
        memory["facts"] = torch.tensor([kappa2.item(), *_range(s.cpu())], dtype=dtype)
        return {entry: value for entry, value in reduced.items() if entry != BODIES}, memory

    def memory(self, facts: Facts) -> Leaves:
        """Return the memory before round one: four zeros for :meth:`report`, on the host."""
        sent = facts.travelling()
        if not any(sent[n].numel() for n in _body(facts.structure) if n in sent):
            raise Conflict(
                f"'aims' cannot be stacked on {self.method!r}: it uploads no body whose likeness could be found"
            )
        dtype = next(v.dtype for v in facts.start.values() if v.is_floating_point())
        return {"facts": torch.zeros(4, dtype=dtype)}

    def report(self, memory: Leaves) -> dict[str, float]:
        """Return kappa^2, the largest squared distance of a body from their mean, and the range of s."""
        names = ("kappa2", "similarity_min", "similarity", "similarity_max")
        return dict(zip(names, memory["facts"].tolist(), strict=True))


def similarities(vectors: Sequence[Tensor | None]) -> np.ndarray:
    """Return s, the cosines of all pairs of clients, rounded to 10 digits; 0 for a client without a vector.

    Example:
        >>> similarities([torch.tensor([3.0, 0.0]), None, torch.tensor([3.0, 4.0])]).tolist()
        [[1.0, 0.0, 0.6], [0.0, 0.0, 0.0], [0.6, 0.0, 1.0]]
    """
    rows = np.zeros((len(vectors), next((len(v) for v in vectors if v is not None), 1)))
    for row, vector in zip(rows, vectors, strict=True):
        if vector is not None:
            row[:] = vector.double().cpu().numpy()
    s: np.ndarray = cosines(torch.from_numpy(rows @ rows.T)).numpy()
    return s


def _body(structure: Structure) -> tuple[str, ...]:
    return tuple(i.name for i in structure.leaves if i.trainable and not i.owner and i.role == "body")


def _range(s: Tensor) -> tuple[float, float, float]:
    """Return the least, mean and largest similarity of two clients; zeros for one client."""
    pairs = s.numpy()[np.triu_indices(len(s), 1)]
    return (float(pairs.min()), float(pairs.mean()), float(pairs.max())) if pairs.size else (0.0, 0.0, 0.0)
