"""Gradients of the clients' objectives where a round begins: what bounds are stated in, measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from fedloom import rng, tensors
from fedloom.clients.messages import Participant, Site
from fedloom.clients.runner import ClientRunner
from fedloom.data import Rows
from fedloom.network.bound_method import Bound, BoundPhase
from fedloom.rounds import server
from fedloom.rounds.run import Run
from fedloom.spec.parts import Phase, Receive, Sweep
from fedloom.tasks.batch import Batch
from fedloom.tensors import Leaves


@dataclass(frozen=True, slots=True)
class Gradients:
    """Gradients of some clients' objectives at the same shared leaves, over their training rows.

    Args:
        weights: share of each client in the mean, by its rows.
        whole: per client the gradient of all terms of the method's objective.
        data: per client the gradient of the terms that fit the data alone; equal to ``whole`` where there are no others.
        noise: ``sum_k p_k mean_b ||g_kb - g_k||^2`` over mini-batches b of the run's size.
        loss: the objective, its weighted mean.
        point: the shared leaves.
    """

    weights: tuple[float, ...]
    whole: tuple[Leaves, ...]
    data: tuple[Leaves, ...]
    noise: float
    loss: float
    point: Leaves

    def mean(self) -> Leaves:
        """``sum_k p_k g_k``."""
        return tensors.weighted_sum(list(self.whole), list(self.weights))


def spread(gradients: Sequence[Leaves], weights: Sequence[float], names: Sequence[str] | None = None) -> float:
    """``H = sum_k p_k ||g_k - sum_j p_j g_j||^2``, over some leaves.

    Example:
        >>> spread([{"w": torch.tensor([1.0])}, {"w": torch.tensor([-1.0])}], [0.5, 0.5])
        1.0

    Reference: OmniISR, eq. 13.
    """
    exact = [{n: g[n].double() for n in (names or g)} for g in gradients]
    middle = tensors.weighted_sum([tensors.clone(g) for g in exact], list(weights))
    return sum(p * float(tensors.square_norm(tensors.sub(g, middle))) for p, g in zip(weights, exact, strict=True))


def fitting_phase(bound: Bound) -> tuple[BoundPhase, tuple[str, ...]] | None:
    """The phase of a round that trains most of the shared model by fitting the data, and those leaves; None if none does."""
    best: tuple[BoundPhase, tuple[str, ...]] | None = None
    for step in bound.method.schedule.round:
        if isinstance(step, Phase):
            phase = bound.phases[step.name]
            names = tuple(n for n in phase.trained if _shared(bound, n))
            fits = any(t.role == "data" for t in phase.terms)
            if names and fits and (best is None or len(names) > len(best[1])):
                best = phase, names
    return best


def _shared(bound: Bound, name: str) -> bool:
    spec = bound.specs[name]
    return spec.kind == "shared" and spec.copy == "main" and not spec.owner


def measure(run: Run, ids: Sequence[str], round: int, rows: int, cloud: Site | None = None) -> Gradients | None:
    """Gradients of clients where a round would begin; nothing that happens here is kept.

    A client has received the model and made the sweeps that come before the phase; phases before it (FedRep's head) are left out.

    Args:
        run: a run between two rounds.
        ids: the clients.
        round: the round that would begin.
        rows: most training rows of a client, chosen once for all rounds.
        cloud: measure this site instead, as the cloud of a hybrid run.
    """
    bound = run.at(round)
    found = fitting_phase(bound)
    if found is None:
        return None
    phase, names = found
    _, sent = server.dispatch(bound, run.state, run.cohort(list(ids), round))
    sites = [Participant(cloud, run.state_of(cloud.id))] if cloud else [run.participant(i, sent) for i in ids]
    plain = tuple(t for t in phase.terms if t.role == "data")
    whole, data, noises, losses, sizes = [], [], [], [], []
    for person in sites:
        if cloud:
            person = replace(person, addressed=dict(next(iter(sent.addressed.values()), {})))
        desk = ClientRunner(bound, run.work, sent.post, [person])
        desk.run(_opening(bound, phase))
        g, noise, loss = _client(desk, phase, names, rows)
        whole.append(g)
        noises.append(noise)
        losses.append(loss)
        data.append(g if plain == phase.terms else _client(desk, replace(phase, terms=plain), names, rows)[0])
        sizes.append(len(person.site.train))
    weights = tuple(n / sum(sizes) for n in sizes)
    return Gradients(
        weights,
        tuple(whole),
        tuple(data),
        sum(p * v for p, v in zip(weights, noises, strict=True)),
        sum(p * v for p, v in zip(weights, losses, strict=True)),
        {n: sent.post.leaves[n].detach().clone() for n in names},
    )


def _opening(bound: Bound, phase: BoundPhase) -> tuple[Receive | Sweep, ...]:
    """What comes before a phase: receiving and sweeping."""
    found: list[Receive | Sweep] = []
    for step in bound.method.schedule.round:
        if isinstance(step, Phase) and step.name == phase.phase.name:
            break
        if isinstance(step, (Receive, Sweep)):
            found.append(step)
    return tuple(found)


def _client(desk: ClientRunner, phase: BoundPhase, names: Sequence[str], rows: int) -> tuple[Leaves, float, float]:
    """One client's gradient, the mean squared distance of its mini-batches' gradients from it, and its loss."""
    step, state = desk.step(phase), desk.start(phase).state(desk.step(phase))
    total: Leaves = {n: torch.zeros_like(state.leaves[n]) for n in names}
    squares = loss = 0.0
    for number, (share, batch) in enumerate(_batches(desk, phase, rows)):
        noise = step.noise_number(desk.inputs, number)
        value, grads, state.carry = step.gradients(state.leaves, desk.inputs, batch, state.carry, noise)
        known = dict(zip(phase.trained, grads or [], strict=False))
        part = {n: g.detach() for n in names if (g := known.get(n)) is not None}
        total = {n: v + share * part[n] if n in part else v for n, v in total.items()}
        squares += share * float(tensors.square_norm({n: g.double() for n, g in part.items()})) if part else 0.0
        loss += share * float(value)
    square = float(tensors.square_norm({n: g.double() for n, g in total.items()}))
    return total, max(squares - square, 0.0), loss


def _batches(desk: ClientRunner, phase: BoundPhase, rows: int) -> Iterator[tuple[float, Batch]]:
    """Mini-batches of the run's size over a fixed choice of rows, each with its share of them."""
    site, size = desk.participants[0].site, desk.work.batch_size
    train: Rows = site.train
    order = rng.stream(desk.work.seed, "sample", "diagnostics", site.id).permutation(len(train))[:rows]
    step = len(order) if size == "full" else int(size)
    chunks = [order[i : i + step] for i in range(0, len(order), step)]
    if desk.bound.network.batch_norm:  # which cannot train on one row
        chunks = [c for c in chunks if len(c) > 1] or [order]
    count = sum(len(c) for c in chunks)
    pairs = phase.phase.sampler.group == 2
    made = [train.take(torch.from_numpy(c).to(train.y.device)) for c in chunks]
    for i, chunk in enumerate(made):
        other = made[(i + 1) % len(made)] if pairs else None
        yield len(chunk) / count, Batch(chunk.x, chunk.y, pair=None if other is None else Batch(other.x, other.y))
