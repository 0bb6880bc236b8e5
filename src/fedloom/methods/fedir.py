"""FedAvg on importance-weighted losses: ``mean_i p(y_i)/q_k(y_i) CE_i``."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fedloom.errors import UserError
from fedloom.methods.class_counts import _classes
from fedloom.methods.fedavg import fedavg
from fedloom.spec.class_losses import weighted_cross_entropy
from fedloom.spec.leaves import Facts
from fedloom.spec.method import Method
from fedloom.spec.parts import Prepare, Prepared, Receive, Send, ServerStage, Stage, Sweep, Term
from fedloom.spec.reducers import total
from fedloom.spec.registry import recipe
from fedloom.spec.seen import Seen
from fedloom.spec.view import View
from fedloom.tasks.batch import Batch
from fedloom.tensors import Leaves, Message

CLASSES = ("classification", "binary", "segmentation")


@recipe(paper="Hsu et al., Federated Visual Classification with Real-World Data Distribution, ECCV 2020")
def fedir(clip: tuple[float, float] | None = None) -> Method:
    """FedAvg on importance-weighted losses: ``mean_i p(y_i)/q_k(y_i) CE_i``.

    p is the label distribution of the federation, q_k the client's; each client sends its histogram once, before round one. The
    mean divides by the number of rows (or valid pixels), not by the sum of weights. Where every q_k = p it is FedAvg bit for bit.

    Args:
        clip: smallest and largest weight; None for no bounds on rows and (0.1, 10) on pixels.
    """
    if clip is not None and (len(clip) != 2 or not 0 <= clip[0] <= clip[1]):
        raise UserError(f"fedir: clip={clip!r}; expected two numbers, 0 <= smallest <= largest")

    def histogram(view: View, batch: Batch, seen: Seen) -> Leaves:
        found = [(batch.y == c).to(seen.n.dtype) for c in range(_classes(view))]
        return {"count": torch.stack([batch.sum(hit.flatten(1).sum(1) if hit.dim() > 1 else hit) for hit in found])}

    def tell(message: Message, memory: Leaves, seen: Seen) -> tuple[Message, Leaves]:
        return {**message, "fedir": seen.swept["fedir"]}, seen.swept["fedir"]

    def blank(facts: Facts) -> Leaves:
        like = next(v for v in facts.start.values() if v.is_floating_point())
        return {"count": like.new_zeros(max(facts.structure.outputs, 2))}

    def loss(view: View, batch: Batch, seen: Seen) -> Tensor:
        p, q = (m["fedir"]["count"] / m["fedir"]["count"].sum().clamp(min=1) for m in (seen.broadcast, seen.memory))
        weight = torch.where(q > 0, p / q.clamp(min=torch.finfo(q.dtype).tiny), torch.zeros_like(p))
        # The cloud of hybrid mode has sent no histogram: its rows count alike.
        weight = torch.where(q.sum() > 0, weight, torch.ones_like(weight))
        bounds = clip or ((0.1, 10.0) if batch.y.dim() > 1 else None)
        return weighted_cross_entropy(view.logits, batch, weight if bounds is None else weight.clamp(*bounds))

    method = fedavg().replacing_data(Term(owner="fedir", fn=loss, role="data", copy=None))
    method = method.replacing_schedule("fedir", setup=(Receive(), Sweep(name="fedir", fn=histogram), Send()))
    method = method.adding(
        stages=(Stage(owner="fedir", fn=tell, entries={"fedir": total()}, memory=blank, when="setup"),),
        prepare=(Prepare(owner="fedir", fn=lambda memory, cohort: Prepared(memory=memory, broadcast=memory)),),
        server=(ServerStage(owner="fedir", fn=lambda r, m, c: (r, r["fedir"]), memory=blank, when="setup"),),
    )
    return replace(method, tasks=CLASSES)
