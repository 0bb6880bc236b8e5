"""FedAF: clients condense their rows into ``ipc`` images per class; the server trains on all images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fedloom import rng
from fedloom.errors import UserError
from fedloom.plugins.prototypes import pooled, with_prototypes
from fedloom.spec.leaves import Facts
from fedloom.spec.method import Method
from fedloom.spec.optimizer import sgd
from fedloom.spec.parts import (
    Extra,
    Partition,
    Phase,
    Prepare,
    Prepared,
    Receive,
    Schedule,
    Send,
    Server,
    ServerStage,
    Stage,
    Sweep,
    Term,
)
from fedloom.spec.reducers import stack
from fedloom.spec.registry import recipe
from fedloom.spec.seen import Cohort, Seen
from fedloom.spec.structure import Structure
from fedloom.spec.terms import data_term
from fedloom.spec.uploads import send_model
from fedloom.spec.view import View
from fedloom.tasks.batch import Batch
from fedloom.tensors import Leaves, Memory, Message

OWNER, ROWS, IMAGES = "fedaf", "fedaf_images", "fedaf:images"
DIRECTIONS = 64
_RESAMPLE, _SLICES = 0x7265, 0x736C


def sliced_wasserstein(a: Tensor, b: Tensor, directions: Tensor) -> Tensor:
    """Mean over directions d of the squared Wasserstein distance of the sets ``{a_i . d}`` and ``{b_i . d}``.

    Args:
        a: points x dimension.
        b: as many points.
        directions: directions x dimension, of length one.
    """
    return ((a @ directions.T).sort(0)[0] - (b @ directions.T).sort(0)[0]).pow(2).mean()


def symmetric_divergence(p: Tensor, q: Tensor) -> Tensor:
    """``(KL(p||q) + KL(q||p)) / 2 = 1/2 sum_j (p_j - q_j)(log p_j - log q_j)`` along the last axis."""
    return 0.5 * ((p - q) * (p.clamp(min=1e-12).log() - q.clamp(min=1e-12).log())).sum(-1)


def mean_gap(real: Tensor, batch: Batch, made: Tensor) -> Tensor:
    """``sum_c ||mean f(real_c) - mean f(made_c)||^2`` over the classes in the batch; ``made`` is classes x images x dimension."""
    count = batch.one_hot(made.shape[0], real.dtype).sum(0)
    means = batch.by_class(real, made.shape[0]) / count.clamp(min=1)[:, None]
    return ((count > 0).to(real.dtype) * ((means - made.mean(1)) ** 2).sum(1)).sum()


# The client: images and the terms that shape them ----------------------------------------------------------


def blank_images(ipc: int) -> Extra:
    """The images of a client, ``ipc`` per class; they begin as rows of its own, see :func:`first_rows`."""

    def build(structure: Structure, generator: np.random.Generator) -> Leaves:
        if structure.inputs is None:
            raise UserError("fedaf: makes inputs of its own, so the model must take one tensor, not several")
        return {"images": torch.zeros(max(structure.outputs, 2), ipc, *structure.inputs)}

    return Extra(owner=OWNER, build=build, kind="mirrored", role="none")


def first_rows(ipc: int) -> Sweep:
    """The first ``ipc`` rows of each class, over again where a class has fewer."""

    def fn(view: View, batch: Batch, seen: Seen) -> Leaves:
        hot = batch.one_hot(seen.counts.shape[-1])
        rank = torch.arange(ipc, device=hot.device)[None] % hot.sum(0).clamp(min=1)[:, None]
        there = (hot.T[:, None] > 0) & (hot.cumsum(0).T[:, None] - 1 == rank[:, :, None])
        inputs = view.inputs
        assert isinstance(inputs, Tensor)
        return {"images": inputs[there.to(inputs.dtype).argmax(2)]}

    return Sweep(name="first_rows", fn=fn, batch_size="full")


def drawn_network(view: View, seen: Seen, step: Tensor, gamma: float) -> Leaves:
    """``gamma w + (1 - gamma) random``; the random leaf has the mean and the spread of the leaf before round one."""
    if gamma == 1:
        return {}
    leaves, spread = {n: view.leaves[n] for n in seen.names(extra=False)}, seen.broadcast[ROWS]
    sizes = [w.numel() for w in leaves.values()]
    noise = rng.normal(rng.fold(seen.noise, _RESAMPLE, step), (sum(sizes),)).split(sizes)
    found = {}
    for (n, w), part in zip(leaves.items(), noise, strict=True):
        random = spread[f"mean/{n}"] + spread[f"std/{n}"] * part.reshape(w.shape).to(w)
        found[n] = gamma * w + (1 - gamma) * random
    return found


def apart(mine: Tensor, seen: Seen, step: Tensor) -> Tensor:
    """Sliced Wasserstein distance of the images' class-mean logits and V; classes that either side lacks add nothing."""
    shared = seen.broadcast[OWNER]
    known = (shared["known"] > 0)[:, None]
    target = torch.where(known, shared["mean"][:, : mine.shape[1]], mine.detach())
    directions = rng.normal(rng.fold(seen.noise, _SLICES, step), (DIRECTIONS, mine.shape[1])).to(mine)
    directions = directions / directions.norm(dim=1, keepdim=True)
    held = (seen.counts > 0)[:, None]
    return sliced_wasserstein(torch.where(held, mine, target), target, directions)


def matching(ipc: int, gamma: float, lam_loc: float) -> Term:
    """The objective of the images."""

    def fn(view: View, batch: Batch, seen: Seen, carry: Leaves) -> tuple[Tensor, Leaves]:
        images, step = view.leaves[IMAGES], carry["step"]
        classes = images.shape[0]
        labels = torch.arange(classes, device=images.device).repeat_interleave(ipc)
        net = drawn_network(view, seen, step, gamma)
        made = view.at(net, batch=Batch(images.flatten(0, 1), labels), train=False)
        real = pooled(view.at(net, train=False).z)
        loss = mean_gap(real, batch, pooled(made.z).reshape(classes, ipc, -1))
        if lam_loc:
            loss = loss + lam_loc * apart(made.logits.reshape(classes, ipc, -1).mean(1), seen, step)
        return loss, {"step": step + 1}

    start = {"step": torch.zeros((), dtype=torch.int64)}
    return Term(owner=OWNER, fn=fn, role="data", phases=("images",), taps=("z",), carry=lambda structure: start)


# The server: everybody's images ----------------------------------------------------------------------------


def agreement(lam_glob: float, soft: Callable[[Tensor], Tensor]) -> Term:
    """``lam_glob sum_c symKL(R_c, mean soft prediction of class c)`` over the classes in the batch."""

    def fn(view: View, batch: Batch, seen: Seen) -> Tensor:
        shared, p = seen.broadcast[OWNER], soft(view.logits)
        classes = shared["known"].shape[0]
        count = batch.one_hot(classes, p.dtype).sum(0)
        means = batch.by_class(p, classes) / count.clamp(min=1)[:, None]
        weight = shared["known"] * (count > 0).to(p.dtype)
        return lam_glob * (weight * symmetric_divergence(shared["mean"][:, p.shape[1] :], means)).sum()

    return Term(owner=OWNER, fn=fn, phases=("server",))


def union(ipc: int) -> tuple[Stage, ServerStage, Prepare]:
    """Images go up with the client's class counts; the server keeps those of classes that a client has."""

    def send(message: Message, memory: Leaves, seen: Seen) -> tuple[Message, Leaves]:
        return {**message, ROWS: {"images": seen.final[IMAGES], "counts": seen.counts}}, memory

    def gather(reduced: Message, memory: Leaves, cohort: Cohort) -> tuple[Message, Leaves]:
        images, held = reduced[ROWS]["images"], reduced[ROWS]["counts"] > 0
        y = torch.arange(held.shape[1], device=held.device).expand_as(held)[held].repeat_interleave(ipc)
        return reduced, {**memory, "x": images[held].flatten(0, 1), "y": y}

    def spread(facts: Facts) -> Leaves:
        start = {n: facts.start[n] for n in facts.structure.trainable()}
        means = {f"mean/{n}": v.mean() for n, v in start.items()}
        return means | {f"std/{n}": v.std(correction=0) for n, v in start.items()}

    def tell(memory: Leaves, cohort: Cohort) -> Prepared:
        return Prepared(memory=memory, broadcast={k: v for k, v in memory.items() if "/" in k})

    stage = Stage(owner=ROWS, fn=send, entries={ROWS: stack()})
    return stage, ServerStage(owner=ROWS, fn=gather, memory=spread), Prepare(owner=ROWS, fn=tell)


@recipe(
    "ipc >= 1",
    "image_steps >= 1",
    "image_lr > 0",
    "0 <= gamma <= 1",
    "lam_loc >= 0",
    "lam_glob >= 0",
    "temperature > 0",
    "server_epochs >= 1",
    paper="Wang et al., An Aggregation-Free Federated Learning for Tackling Data Heterogeneity, CVPR 2024, Algorithm 1",
    presets={"paper": {"ipc": 50}},
)
def fedaf(
    ipc: int = 10,
    image_steps: int = 100,
    image_lr: float = 1.0,
    gamma: float = 0.9,
    lam_loc: float = 0.8,
    lam_glob: float = 1.0,
    temperature: float = 2.0,
    server_epochs: int = 20,
) -> Method:
    """Clients condense their rows into ``ipc`` images per class; the server trains the model on everybody's images.

    Client: from rows of its own, ``sum_c ||mean z(real_c) - mean z(S_c)||^2 + lam_loc SW({mean logits of S_c}, {V_c})``,
    SW the sliced Wasserstein distance, under a network drawn anew for each step, ``gamma w + (1 - gamma) random``. It
    sends S, and per class the sums of its logits and of ``softmax(logits / temperature)`` under the received model; V and
    R are their means over clients. Server: on the union of all S, ``CE + lam_glob sum_c symKL(R_c, mean softmax of class
    c)``. The random network has each leaf's mean and spread before round one; everything is in evaluation mode at the
    client. One model for all. Images made from private rows leave the client.

    Args:
        ipc: images per class.
        image_steps: steps on the images in a round.
        image_lr: their size.
        gamma: share of the received model in the drawn networks.
        lam_loc: strength of the agreement with V; 0 builds no term.
        lam_glob: strength of the agreement with R; 0 builds no term.
        temperature: of the soft labels.
        server_epochs: epochs of the server over all images, with the run's optimiser.
    """

    def soft(logits: Tensor) -> Tensor:
        return torch.softmax(logits / temperature, 1)

    def begin(start: Leaves, seen: Seen) -> Leaves:
        return {IMAGES: torch.where(seen.first > 0, seen.swept["first_rows"]["images"], start[IMAGES])}

    def rows(memory: Memory) -> tuple[Tensor, Tensor]:
        return memory[ROWS]["x"], memory[ROWS]["y"]

    stage, gathering, telling = union(ipc)
    images = Phase(name="images", leaves=IMAGES, steps=image_steps, stream="images", optimizer=sgd(lr=image_lr))
    training = Phase(name="server", epochs=server_epochs)
    terms = (matching(ipc, gamma, lam_loc), replace(data_term(), phases=("server",)))
    method = Method(
        objective=(*terms, *((agreement(lam_glob, soft),) if lam_glob else ())),
        partition=Partition(extras=(blank_images(ipc),), receive=begin),
        schedule=Schedule(
            round=(Receive(rule=False), first_rows(ipc), Receive(), images, Send()),
            adapt=(Receive(rule=False),),
            server=(Receive(plain=True), training, Send()),
        ),
        upload=(replace(send_model(), when="server"), stage),
        server=Server(prepare=(telling,), stages=(gathering,), rows=rows),
        sealed="its clients train images, not a model",
    )
    return with_prototypes(
        method,
        owner=OWNER,
        at="received",
        feature=lambda view: torch.cat([view.logits, soft(view.logits)], 1),
        taps=(),
        width=lambda structure: 2 * max(structure.outputs, 2),
    )
