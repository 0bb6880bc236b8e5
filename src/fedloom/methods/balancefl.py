"""FedAvg with local training as if classes were balanced: ``CE_present(z + e) + lam KD_absent - entropy sum_i H_i``."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom import rng
from fedloom.methods.class_counts import _classes
from fedloom.methods.fedavg import fedavg
from fedloom.ops.resize import resized
from fedloom.spec.class_losses import divergence, mean_over, spread, teacher, valid, weighted_cross_entropy, within
from fedloom.spec.method import Method
from fedloom.spec.parts import Phase, Receive, Sampler, Send, Sweep, Term
from fedloom.spec.registry import recipe
from fedloom.spec.seen import Seen
from fedloom.spec.view import View
from fedloom.tasks.batch import Batch
from fedloom.tensors import Leaves


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
