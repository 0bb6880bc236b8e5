"""Class prototypes: the sweep that makes them, their upload, the server's rule, and the loss that pulls to them.

FedProto, FedAIMS and FedPAC are built from these parts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from fedloom.errors import UserError
from fedloom.ops import pooled
from fedloom.spec.leaves import Facts
from fedloom.spec.method import Method
from fedloom.spec.parts import Prepare, Prepared, ServerStage, Stage, Sweep
from fedloom.spec.reducers import ratio
from fedloom.spec.seen import Cohort, Seen
from fedloom.spec.structure import Structure, TapChooser
from fedloom.spec.view import View
from fedloom.tasks.batch import Batch
from fedloom.tensors import Leaves, Message

OWNER = "prototypes"


def pull(z: Tensor, batch: Batch, centres: Tensor, known: Tensor) -> Tensor:
    """``1/(b D) sum_i known[y_i] ||z_i - C[y_i]||^2`` over a batch of b rows: mean over rows and dimensions.

    A row whose class has no prototype adds zero but is counted in b.

    Args:
        z: rows x D.
        batch: the rows.
        centres: classes x D; constants.
        known: per class 1 where there is a prototype, else 0.
    """
    y = batch.y.long()
    return batch.mean(known[y] * ((z - centres[y]) ** 2).mean(1))


def class_sweep(
    name: str = OWNER,
    *,
    feature: Callable[[View], Tensor] | None = None,
    taps: TapChooser = ("z",),
    at: Literal["now", "received"] = "now",
) -> Sweep:
    """A pass over the rows in evaluation mode that adds up a feature per class.

    ``seen.swept[name]`` is then ``{"sum": sum_{i: y_i = c} u(x_i), "count": n_kc}``; the classes' means are
    ``sum / count``.

    Args:
        name: of the sweep.
        feature: ``view -> rows x D``; None for the head's input z, pooled. Several features of one row can be
            joined along axis 1.
        taps: the modules that ``feature`` reads.
        at: which leaves: those after training, or those received.
    """

    def fn(view: View, batch: Batch, seen: Seen) -> Leaves:
        u = pooled(view.z) if feature is None else feature(view)
        classes = seen.counts.shape[-1]
        return {"sum": batch.by_class(u, classes), "count": batch.one_hot(classes, u.dtype).sum(0)}

    return Sweep(name=name, fn=fn, taps=taps, at=at)


def feature_width(structure: Structure) -> int:
    """D, the size of the head's input."""
    if structure.feature is None:
        raise UserError(
            "prototypes are means of the head's input, but the model's head was not found; name it with head='...'"
        )
    return structure.feature


def with_prototypes(
    method: Method,
    *,
    owner: str = OWNER,
    at: Literal["now", "received", "start"] = "now",
    weight: Literal["n", "uniform"] = "n",
    feature: Callable[[View], Tensor] | None = None,
    taps: TapChooser = ("z",),
    width: Callable[[Structure], int] = feature_width,
) -> Method:
    """The method with class prototypes that clients make and the server joins and sends.

    Clients send sums and counts per class; the server takes ``C_c = sum_k n_kc C_kc / sum_k n_kc`` over the round's
    clients that hold c, and keeps the old C_c where none does. ``seen.broadcast[owner]`` is ``{"mean": C, "known":
    1 or 0 per class}``; ``seen.swept[owner]`` the client's own sums and counts.

    Args:
        method: the method.
        owner: who keeps them; the name of sweep, entry and memory.
        at: made after local training, or before it: from the model received, or from the client's own start (the same where
            every leaf before the head is shared).
        weight: ``"n"`` weighs a client's class mean by its rows of the class, ``"uniform"`` all holders alike.
        feature: as for :func:`class_sweep`.
        taps: as for :func:`class_sweep`.
        width: size D of the feature.
    """

    def send(message: Message, memory: Leaves, seen: Seen) -> tuple[Message, Leaves]:
        swept = seen.swept[owner]
        top, count = swept["sum"], swept["count"]
        if weight == "uniform":
            top, count = top / count.clamp(min=1)[:, None], (count > 0).to(count.dtype)
        return {**message, owner: {"sum": top, "count": count}}, memory

    def blank(facts: Facts) -> Leaves:
        like = next(v for v in facts.start.values() if v.is_floating_point())
        classes = max(facts.structure.outputs, 2)
        return {"mean": like.new_zeros(classes, width(facts.structure)), "known": like.new_zeros(classes)}

    def renew(reduced: Message, memory: Leaves, cohort: Cohort) -> tuple[Message, Leaves]:
        new = reduced[owner]
        held = new["count"] > 0
        mean = torch.where(held[:, None], new["mean"], memory["mean"])
        return reduced, {"mean": mean, "known": torch.maximum(memory["known"], held.to(mean.dtype))}

    return replace(
        method.sweeping(
            class_sweep(owner, feature=feature, taps=taps, at="received" if at == "received" else "now"),
            at="end" if at == "now" else "start",
        ).adding(
            stages=(Stage(owner=owner, fn=send, entries={owner: ratio()}),),
            prepare=(Prepare(owner=owner, fn=lambda memory, cohort: Prepared(memory=memory, broadcast=memory)),),
            server=(ServerStage(owner=owner, fn=renew, memory=blank),),
        ),
        tasks=("classification", "binary"),
    )
