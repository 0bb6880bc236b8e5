"""FedAS: a shared body, aligned with the client's previous features before training, and a personal head."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from fedloom import tensors
from fedloom.methods.fedavg import fedavg
from fedloom.plugins.personal import personal
from fedloom.plugins.prototypes import class_sweep, pooled
from fedloom.spec.method import Method
from fedloom.spec.optimizer import sgd
from fedloom.spec.parts import Phase, Receive, Rule, Send, Stage, Sweep, Term
from fedloom.spec.reducers import mean
from fedloom.spec.registry import recipe
from fedloom.spec.seen import Seen
from fedloom.spec.terms import data_term
from fedloom.spec.view import View
from fedloom.tasks.batch import Batch
from fedloom.tensors import Leaves, Message


def class_means_gap(z: Tensor, batch: Batch, means: Tensor) -> Tensor:
    """``sum_c mean_{i: y_i = c} mean_d (z_id - means_cd)^2`` over the classes in the batch."""
    gap = ((z - means[batch.y.long()]) ** 2).mean(1, keepdim=True)
    count = batch.one_hot(means.shape[0], z.dtype).sum(0)
    return (batch.by_class(gap, means.shape[0])[:, 0] / count.clamp(min=1)).sum()


@recipe(
    "align_lr >= 0",
    "align_batch >= 1",
    paper="Yang et al., FedAS: Bridging Inconsistency in Personalized Federated Learning, CVPR 2024, Algorithm 1",
)
def fedas(align_lr: float = 0.01, align_batch: int = 16) -> Method:
    """A shared body and a personal head; a client first moves the received body towards the features it had.

    On receipt the class means of z under the client's old body are taken; one epoch of SGD moves the received body on
    ``sum_c mean ||z - mean_c||^2 / D`` over the classes of a mini-batch; then body and head train together. The server
    averages the bodies with weights ``F_k / sum F``, F_k the trace of the client's Fisher information after training:
    ``sum_batches ||grad of the mean loss||^2``, evaluation mode, all leaves. A client is evaluated with its own body and
    head as it last had them.

    Args:
        align_lr: step of the alignment; 0 leaves it out.
        align_batch: rows of its mini-batches.
    """

    def begin(start: Leaves, seen: Seen) -> Leaves:
        return {n: seen.received[n] for n in seen.names("mirrored", trainable=None)}

    def align(view: View, batch: Batch, seen: Seen) -> Tensor:
        old = seen.swept["fedas"]
        return class_means_gap(pooled(view.z), batch, old["sum"] / old["count"].clamp(min=1)[:, None])

    def fisher(view: View, batch: Batch, seen: Seen) -> Leaves:
        g = view.gradient(lambda other: other.loss(), seen.names(extra=False))
        return {"weight": tensors.square_norm(g)}

    def weigh(message: Message, memory: Leaves, seen: Seen) -> tuple[Message, Leaves]:
        return {**message, "fisher": seen.swept["fisher"]}, memory

    near = Phase(
        name="align",
        leaves="body",
        epochs=1,
        batch_size=align_batch,
        stream="align",
        optimizer=sgd(lr=align_lr),
    )
    before = (Receive(rule=False), class_sweep("fedas"), Receive(), near) if align_lr else (Receive(),)
    after = (Phase(), Sweep(name="fisher", fn=fisher, batch_size="run"), Send())
    method = (
        fedavg()
        .replacing_schedule("fedas", round=(*before, *after), adapt=(Receive(rule=False),))
        .replacing_receive("fedas", begin)
        .replacing_data(replace(data_term(), phases=("main",)))
        .replacing_reducer("fedas", "delta", mean("fisher"))
        .adding(
            rules=(Rule(owner="fedas", pattern="body", kind="mirrored"),),
            terms=(Term(owner="fedas", fn=align, phases=("align",), taps=("z",)),) if align_lr else (),
            stages=(Stage(owner="fedas", fn=weigh),),
        )
    )
    return replace(personal("head")(method), tasks=("classification", "binary"))
