"""The values that client code reads besides leaves and batch, grouped by their layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedloom import rng
from fedloom.clients.arrangement import Arrangement
from fedloom.clients.messages import Participant, Post, Work
from fedloom.devices import to_device_async
from fedloom.network.bound_method import Bound
from fedloom.spec.seen import Seen
from fedloom.tensors import Leaves, map_nested


@dataclass(frozen=True, slots=True)
class ClientInputs:
    """The fields of :class:`fedloom.spec.seen.Seen` in three groups. The group decides the layout.

    Args:
        own: tensors with a client axis in a wave: start, addressed, memory, swept, steps, n,
            counts, first, noise, and key in a wave of clients with different keys.
        common: tensors that all clients share: received, broadcast, gate. If the clients of a wave
            belong to several runs, these fields and lr and rates are in ``own`` instead.
        facts: Python values: round, lr, rates, momenta, cohort, population, specs, and key if
            ``own`` has none.
        seen_type: the class of the values; a recording subclass while a step is traced.
    """

    own: dict[str, Any]
    common: dict[str, Any]
    facts: Mapping[str, Any]
    seen_type: Callable[..., Seen] = Seen

    def seen(self, own: Mapping[str, Any], final: Leaves | None = None) -> Seen:
        """Return what client code of one client reads, given its part of ``own``."""
        return self.seen_type(**own, **self.common, **self.facts, final=final or {})

    def with_own(self, **changes: Any) -> ClientInputs:
        """Return a copy with other values of some fields of ``own``."""
        return replace(self, own={**self.own, **changes})

    def front(self, clients: int) -> ClientInputs:
        """Return the inputs of the first clients of a wave, as views."""
        return replace(self, own=map_nested(lambda value: value[:clients], self.own))


def client_inputs(
    bound: Bound, work: Work, post: Post, people: Sequence[Participant], arrangement: Arrangement
) -> ClientInputs:
    """Return the inputs of these clients at the beginning of a round."""
    stack, device = arrangement.stack, next(iter(post.leaves.values())).device

    def numbers(*rows: Sequence[float], dtype: torch.dtype) -> list[Tensor]:
        table = to_device_async(torch.tensor(rows, dtype=dtype), device)  # one copy to the device
        return list(table.unbind(0) if arrangement.several else table[:, 0].unbind(0))

    n, first = numbers(
        [len(p.site.train) for p in people], [p.state.rounds == 0 for p in people], dtype=bound.structure.dtype
    )
    (noise,) = numbers([rng.key_of(work.seed, "noise", p.site.id, post.round) for p in people], dtype=torch.int64)
    memories = [{**bound.memory, **p.state.memory} for p in people]
    own: dict[str, Any] = {
        "start": {},
        "addressed": {
            owner: {k: stack([p.addressed[owner][k] for p in people]) for k in names}
            for owner, names in people[0].addressed.items()
        },
        "memory": {
            owner: {k: stack([memory[owner][k] for memory in memories]) for k in names}
            for owner, names in bound.memory.items()
        },
        "swept": {},
        "steps": {},
        "n": n,
        "counts": stack([p.site.counts for p in people]),
        "first": first,
        "noise": noise,
    }
    optimizers = {name: phase.phase.optimizer or work.optimizer for name, phase in bound.phases.items()}
    facts = {
        "round": post.round,
        "lr": work.optimizer.lr_at(post.round, work.rounds),
        "rates": {name: o.lr_at(post.round, work.rounds) for name, o in optimizers.items()},
        "momenta": {name: o.momentum for name, o in optimizers.items()},
        "cohort": post.cohort,
        "population": post.population,
        "specs": bound.specs,
    }
    if arrangement.several and bound.client_key is not None and people[0].key is not None:
        owner, name = bound.client_key
        own["key"] = own["addressed"][owner][name]
    else:
        facts["key"] = people[0].key
    return ClientInputs(own, {"received": post.leaves, "broadcast": post.broadcast, "gate": post.gate}, facts)
