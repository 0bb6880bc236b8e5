"""Information that tapped features contain about the clients' labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from fedloom.spec.parts import Sweep
from fedloom.spec.seen import Seen
from fedloom.spec.tap_losses import information_term
from fedloom.spec.taps import Tap, named
from fedloom.spec.view import View
from fedloom.tasks.batch import Batch
from fedloom.tensors import Leaves

if TYPE_CHECKING:
    from fedloom.rounds.run import Run


@dataclass(frozen=True, slots=True)
class Information:
    """What the features at a tap tell of a client's labels, in nats.

    Args:
        client: the client.
        tap: the module.
        entropy: H(Y) of the training labels (pixels for dense tasks).
        loss: MI_m, the cross-entropy of the adapter.
        bound: ``H(Y) - MI_m``, a lower bound of the mutual information of features and labels.
    """

    client: str
    tap: str
    entropy: float
    loss: float
    bound: float


def informed(run: Run, clients: Sequence[str]) -> list[Information]:
    """The bound for some clients of a run between two rounds; nothing where the method has no adapters."""
    bound = run.at(run.state.round)
    names = [
        n[4:-7]
        for n in (leaf.name for leaf in bound.structure.leaves)
        if n.startswith("isr:") and n.endswith(".weight")
    ]
    if not names:
        return []
    taps = [named(bound.structure, name, "given") for name in names]
    sweep = Sweep(
        name="information",
        fn=lambda view, batch, seen: _sums(taps, view, batch, seen),
        copy=bound.method.evaluate.copy,
        taps=tuple(names),
    )
    found = []
    for client in clients:
        sums = run.desk(client).sweep(sweep)
        share = sums["labels"] / sums["labels"].sum()
        entropy = float(-(share * share.clamp(min=1e-300).log()).sum())
        for tap in taps:
            loss = float(sums[tap.name] / sums["labels"].sum())
            found.append(Information(client, tap.name, entropy, loss, entropy - loss))
    return found


def _sums(taps: list[Tap], view: View, batch: Batch, seen: Seen) -> Leaves:
    """Labels per class, and the adapters' losses times the number of labels."""
    classes = max(view.structure.outputs, 2)
    y = batch.y.reshape(batch.y.shape[0], -1)
    hot = (y[:, :, None] == torch.arange(classes, device=y.device)).to(view.structure.dtype).sum(1)
    sums: dict[str, Any] = {"labels": batch.sum(hot)}
    for tap in taps:
        weight, bias = (view.leaves[f"isr:{tap.name}.{part}"] for part in ("weight", "bias"))
        z = view.feature(tap.name).to(view.structure.dtype)
        sums[tap.name] = information_term(view, z, weight, bias, tap.axis) * sums["labels"].sum()
    return sums
