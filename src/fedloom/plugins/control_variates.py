"""SCAFFOLD's control variates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from fedloom import tensors
from fedloom.spec.leaves import Facts
from fedloom.spec.method import Method
from fedloom.spec.parts import Prepare, Prepared, ServerStage, Stage
from fedloom.spec.reducers import mean
from fedloom.spec.registry import plugin
from fedloom.spec.seen import Cohort, Seen
from fedloom.spec.terms import inner_product
from fedloom.tensors import Leaves, Message

OWNER = "control_variates"


@plugin("eta_g > 0", paper="Karimireddy et al., SCAFFOLD, ICML 2020, Algorithm 1 (option II)")
def control_variates(eta_g: float = 1.0) -> Callable[[Method], Method]:
    """Corrects client drift: each local step uses ``g - c_k + c``.

    The correction is the gradient of the term ``<c - c_k, theta>``. After K steps ``c_k+ = c_k - c + (w - y_k) / (K eta)``; the
    server moves ``w += eta_g mean(y_k - w)`` and ``c += (M/N) mean(c_k+ - c_k)``, uniform means. It acts on the user's leaves
    that are shared in the round. Its definition needs plain SGD.

    Args:
        eta_g: the server's step.
    """

    def zeros(facts: Facts) -> Leaves:
        return tensors.zeros_like(facts.travelling())

    def renew(message: Message, memory: Leaves, seen: Seen) -> tuple[Message, Leaves]:
        c, sub = seen.broadcast[OWNER], partial(tensors.by_list, torch._foreach_sub, torch.sub)
        alike = {seen.specs[name].phases: name for name in memory}
        made = {phases: seen.steps_of(name).clamp(min=1) * seen.lr_of(name) for phases, name in alike.items()}
        gaps = sub([seen.received[name] for name in memory], [seen.final[name] for name in memory])
        steps = [made[seen.specs[name].phases] for name in memory]
        columns = [s.reshape(s.shape + (1,) * (gap.dim() - s.dim())) for s, gap in zip(steps, gaps, strict=True)]
        drifts = tensors.by_list(torch._foreach_div, torch.div, list(gaps), columns)
        moved = sub(list(drifts), [c[name] for name in memory])
        change = {name: seen.gated(name, value) for name, value in zip(memory, moved, strict=True)}
        new = tensors.by_list(torch._foreach_add, torch.add, list(memory.values()), list(change.values()))
        kept = {name: seen.gated(name, value) for name, value in zip(memory, new, strict=True)}
        return {**message, "control": change}, kept

    def settle(reduced: Message, memory: Leaves, cohort: Cohort) -> tuple[Message, Leaves]:
        share = len(cohort) / cohort.population
        old, change = list(memory.values()), [reduced["control"][name] for name in memory]
        moved = torch._foreach_add(old, torch._foreach_mul(change, share)) if memory else ()
        if eta_g != 1:
            reduced = {**reduced, "delta": tensors.scale(reduced["delta"], eta_g)}
        return reduced, dict(zip(memory, moved, strict=True))

    def apply(method: Method) -> Method:
        stage = Stage(owner=OWNER, fn=renew, entries={"control": mean("uniform")}, memory=zeros)
        method = method.replacing_reducer(OWNER, "delta", mean("uniform")).adding(
            terms=(inner_product(OWNER, lambda seen: seen.broadcast[OWNER], minus=lambda seen: seen.memory[OWNER]),),
            stages=(stage,),
            prepare=(Prepare(owner=OWNER, fn=lambda memory, cohort: Prepared(memory=memory, broadcast=memory)),),
            server=(ServerStage(owner=OWNER, fn=settle, memory=zeros),),
        )
        return replace(method, plain_sgd=True)

    return apply
