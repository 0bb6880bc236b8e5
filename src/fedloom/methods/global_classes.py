"""Methods for clients whose labels or pictures are distributed differently: FedIR, BalanceFL, FedGau."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom import rng
from fedloom.errors import UserError
from fedloom.methods.averaging import fedavg
from fedloom.objectives.classes import (
    divergence,
    mean_over,
    spread,
    teacher,
    valid,
    weighted_cross_entropy,
    within,
)
from fedloom.record import Method
from fedloom.reducers import mean, stack, total
from fedloom.registry import recipe
from fedloom.resizing import resized
from fedloom.slots import Phase, Prepare, Prepared, Receive, Sampler, Send, ServerStage, Stage, Sweep, Term
from fedloom.types import Batch, Cohort, Facts, Leaves, Message, Seen
from fedloom.view import View

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


def _classes(view: View) -> int:
    return max(view.structure.outputs, 2)


# BalanceFL ------------------------------------------------------------------------------------------------


def balanced_order(generator: np.random.Generator, labels: np.ndarray) -> np.ndarray:
    """As many rows as there are, drawn with replacement so that each class is as likely as any other.

    A picture with several classes is drawn for each of them.
    """
    held = labels if labels.ndim == 2 else labels[:, None] == np.unique(labels)
    weight = (held / held.sum(0).clip(min=1)).sum(1)
    # A picture without any valid pixel is drawn like one of a class of its own.
    weight = np.where(weight > 0, weight, 1 / len(weight))
    return generator.choice(len(labels), size=len(labels), p=weight / weight.sum())


def _labelled(z: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Features, labels and weights as rows: as they are, or one row per position of a map (labels by nearest pixel)."""
    y, weight = batch.y, valid(batch, batch.y.to(z.dtype))
    if batch.mask is not None:
        weight = weight * batch.mask.to(z.dtype).reshape(-1, *[1] * (weight.dim() - 1))
    if z.dim() == 2:
        return z, y, weight
    small = [F.interpolate(t[:, None].to(z.dtype), size=z.shape[2:], mode="nearest").flatten() for t in (y, weight)]
    return z.movedim(1, -1).flatten(0, -2), small[0].round().to(y.dtype), small[1]


def _scatter(view: View, batch: Batch, seen: Seen) -> Leaves:
    """Sums over rows: of 1 and of z per class, and of z z^T over all."""
    z, y, weight = _labelled(view.z, batch)
    hot = (y[:, None] == torch.arange(_classes(view), device=y.device)).to(z.dtype) * weight[:, None]
    return {"count": hot.sum(0), "sum": hot.T @ z, "square": (z * hot.sum(1, keepdim=True)).T @ z}


def _root(sums: Leaves, seen: Seen) -> Leaves:
    """The symmetric root of ``Sigma = 1/n sum_i (z_i - mean_{y_i}) (z_i - mean_{y_i})^T``, and the chances ``1 - n_c/n_max``.

    Directions narrower than 1e-6 of the widest variance are taken as flat: the root of rounding noise is not small.
    """
    count = sums["count"]
    mean = sums["sum"] / count.clamp(min=1)[:, None]
    sigma = (sums["square"] - (mean * count[:, None]).T @ mean) / count.sum()
    values, vectors = torch.linalg.eigh(sigma)
    values = torch.where(values > 1e-6 * values[-1:], values, torch.zeros_like(values))
    root = (vectors * values.clamp(min=0).sqrt()) @ vectors.mT
    return {"root": root, "chance": 1 - count / count.amax(), "count": count}


@recipe(
    "lam >= 0",
    "tau > 0",
    "entropy >= 0",
    paper="Shuai et al., BalanceFL: Addressing Class Imbalance in Long-Tail Federated Learning, IPSN 2022",
)
def balancefl(lam: float = 1.0, tau: float = 2.0, entropy: float = 0.002, augment: bool = True) -> Method:
    """FedAvg with local training as if classes were balanced: ``CE_present(z + e) + lam KD_absent - entropy sum_i H_i``.

    ``CE_present``: cross-entropy with a soft-max over the classes that the client holds, on rows drawn class by class, with e ~
    N(0, Sigma) added to the head's input with probability ``1 - n_c/n_max``; Sigma is the pooled within-class covariance of z under
    the received model (divided by n). ``KD_absent``: mean KL from the received model's soft-max over the absent classes (temperature tau), 0
    where none is absent. ``H_i``: entropy of the soft-max over the present classes, without e; of a picture, its mean over pixels.

    Args:
        lam: weight of the distillation.
        tau: its temperature.
        entropy: weight of the entropies.
        augment: whether features are augmented.
    """

    def augmented(view: View, batch: Batch, seen: Seen, step: Tensor) -> Tensor:
        swept, key = seen.swept["balancefl"], rng.fold(seen.noise, _STREAM, step)
        z, y, _ = _labelled(view.z, batch)
        chance = swept["chance"][y.long().clamp(max=_classes(view) - 1)]
        hit = (rng.uniform(rng.fold(key, 0), (z.shape[0],), z.dtype) < chance).to(z.dtype)
        noise = rng.normal(rng.fold(key, 1), tuple(z.shape), z.dtype) @ swept["root"]
        moved = z + hit[:, None] * noise
        if view.z.dim() > 2:
            shape = view.z.movedim(1, -1).shape
            moved = moved.reshape(shape).movedim(-1, 1)
        logits = view.head(moved)
        if logits.dim() > 2 and logits.shape[2:] != batch.y.shape[1:]:
            logits = resized(logits, batch.y.shape[1:])
        return logits

    def loss(view: View, batch: Batch, seen: Seen, carry: Leaves) -> tuple[Tensor, Leaves]:
        logits = view.logits
        present = spread(seen.swept["balancefl"]["count"] > 0, logits)
        fitted = augmented(view, batch, seen, carry["step"]) if augment else logits
        value = weighted_cross_entropy(within(fitted, present), batch)
        if lam:
            value = value + lam * mean_over(divergence(logits, teacher(view, seen).logits, ~present, tau), batch)
        if entropy:
            logs = F.log_softmax(within(logits, present), 1)
            spent = -torch.where(present, logs.exp() * logs, torch.zeros_like(logs)).sum(1)
            value = value - entropy * batch.sum(spent if spent.dim() == 1 else spent.flatten(1).mean(1))
        return value, {"step": carry["step"] + 1}

    term = Term(
        owner="balancefl",
        fn=loss,
        role="data",
        copy=None,
        taps=("z",),
        carry=lambda structure: {"step": torch.zeros((), dtype=torch.int64)},
    )
    sweep = Sweep(name="balancefl", fn=_scatter, finish=_root, at="received", taps=("z",))
    phase = Phase(sampler=Sampler(order=balanced_order))
    method = fedavg().replacing_data(term)
    method = method.replacing_schedule("balancefl", round=(Receive(), sweep, phase, Send()))
    return replace(method, tasks=("classification", "segmentation"))


_STREAM = 0x62616C61  # keeps this noise apart from dropout's, which folds step numbers into the same key


# FedGau ---------------------------------------------------------------------------------------------------


def bhattacharyya(mean_a: Tensor, var_a: Tensor, mean_b: Tensor, var_b: Tensor) -> Tensor:
    """``1/4 (m_a - m_b)^2 / (v_a + v_b) + 1/2 ln((v_a + v_b) / (2 sqrt(v_a v_b)))``, the distance of two Gaussians.

    Example:
        >>> one, two = torch.tensor(1.0).double(), torch.tensor(2.0).double()
        >>> round(float(bhattacharyya(one * 0, one, one, two)), 6)
        0.112779
    """
    tiny = torch.finfo(var_a.dtype).tiny
    both = (var_a + var_b).clamp(min=tiny)
    spread_ = (2 * (var_a.clamp(min=tiny).sqrt() * var_b.clamp(min=tiny).sqrt())).clamp(min=tiny)
    return 0.25 * (mean_a - mean_b) ** 2 / both + 0.5 * (both / spread_).log()


def matched(mean: Tensor, var: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
    """Moment match of Gaussians along axis 0: ``mu = mean mu_i``, ``var = mean(var_i + mu_i^2) - mu^2``, weighted by n."""
    n = n / n.sum()
    centre = (n * mean).sum(0)
    return centre, (n * (var + mean**2)).sum(0) - centre**2


@recipe(
    "eps > 0",
    paper="Kou et al., Fast-Convergent and Communication-Alleviated Heterogeneous Hierarchical Federated Learning in "
    "Autonomous Driving, IEEE T-ITS 2025 (one level instead of two)",
)
def fedgau(eps: float = 1e-3) -> Method:
    """FedAvg with weights from the pictures' statistics: ``p_k`` proportional to ``n_k / (D_k + eps)``.

    A picture is a Gaussian (mean and variance of its pixels, averaged over channels), a client the moment match of its pictures, and
    D_k the Bhattacharyya distance of client k to the union of all. Clients send (mu_k, var_k) once, before round one. Equal
    clients give FedAvg to rounding. The proportionality is a reading of the paper: its public code only has the resulting numbers.

    Args:
        eps: keeps the weight of a client at distance 0 finite.
    """

    def statistics(view: View, batch: Batch, seen: Seen) -> Leaves:
        if not isinstance(batch.x, Tensor):
            raise UserError("fedgau: it needs one tensor of inputs per row, but the rows have several")
        x = batch.x.to(seen.n.dtype)
        pixels = x.flatten(2) if x.dim() > 2 else x[:, None]
        mu, var = pixels.mean(2).mean(1), pixels.var(2, correction=0).mean(1)
        return {"mean": batch.sum(mu), "square": batch.sum(var + mu**2)}

    def tell(message: Message, memory: Leaves, seen: Seen) -> tuple[Message, Leaves]:
        mu, square = (seen.swept["fedgau"][k] / seen.n for k in ("mean", "square"))
        return {**message, "fedgau": {"mean": mu, "var": square - mu**2}}, memory

    def weigh(reduced: Message, memory: Leaves, cohort: Cohort) -> tuple[Message, Leaves]:
        mu, var = reduced["fedgau"]["mean"].double(), reduced["fedgau"]["var"].double()
        n = torch.tensor(cohort.rows, dtype=torch.float64, device=mu.device)
        weight = n / (bhattacharyya(mu, var, *matched(mu, var, n)) + eps)
        return reduced, {"weight": weight / weight.sum()}

    def address(memory: Leaves, cohort: Cohort) -> Prepared:
        place = {name: i for i, name in enumerate(cohort.order)}
        # A participant that is none of the federation's clients works alone, where any weight does.
        one = {i: memory["weight"][place[i]] if i in place else memory["weight"].sum() for i in cohort.ids}
        return Prepared(memory=memory, addressed={i: {"weight": w} for i, w in one.items()})

    def attach(message: Message, memory: Leaves, seen: Seen) -> tuple[Message, Leaves]:
        return {**message, "weight": seen.addressed["fedgau"]}, memory

    method = fedavg().replacing_reducer("fedgau", "delta", mean("weight"))
    method = method.replacing_schedule("fedgau", setup=(Receive(), Sweep(name="fedgau", fn=statistics), Send()))
    return method.adding(
        stages=(
            Stage(owner="fedgau", fn=tell, entries={"fedgau": stack()}, when="setup"),
            Stage(owner="fedgau", fn=attach, entries={"weight": total()}),
        ),
        prepare=(Prepare(owner="fedgau", fn=address),),
        server=(ServerStage(owner="fedgau", fn=weigh, memory=lambda f: {"weight": torch.zeros(0)}, when="setup"),),
    )
