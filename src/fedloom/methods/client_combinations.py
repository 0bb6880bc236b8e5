"""Messages that the server combines separately for each client."""

from __future__ import annotations

import torch
from torch import Tensor

from fedloom.spec.parts import Prepare, Prepared
from fedloom.spec.seen import Cohort
from fedloom.spec.structure import Pattern, matches
from fedloom.tensors import Leaves


def posted(memory: Leaves, letters: Leaves, cohort: Cohort) -> Leaves:
    """The server's memory with new letters, given as stacks in the order of the cohort."""
    new = {f"{client}/{n}": v[i].clone() for n, v in letters.items() for i, client in enumerate(cohort.ids)}
    return {**memory, **new}


def delivery(owner: str, pattern: Pattern) -> Prepare:
    """Hands each client its last letter in ``seen.addressed[owner]``; those without one get the server's own leaves."""

    def fn(memory: Leaves, cohort: Cohort) -> Prepared:
        names = [i.name for i in cohort.structure.leaves if i.trainable and matches(pattern, i)]
        letters = {c: {n: memory.get(f"{c}/{n}", cohort.leaves[n]) for n in names} for c in cohort.ids}
        return Prepared(memory=memory, addressed=letters)

    return Prepare(owner=owner, fn=fn)


def combined(weights: Tensor, deltas: Leaves, cohort: Cohort) -> Leaves:
    """Per client k ``w + sum_j weights[k, j] delta_j``, as stacks."""
    return {n: cohort.leaves[n] + torch.einsum("kj,j...->k...", weights.to(v.dtype), v) for n, v in deltas.items()}
