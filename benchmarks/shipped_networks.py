"""Every shipped network with fewer than five million parameters, as ``engine="auto"`` runs it, beside a hand-written loop of all threads.

The rule: ``auto`` loses to the hand-written loop by at most 5 %, from the second round on, with batches of 8 and of 64.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from lib.side import HEADER, beside, row, tables, write
from torch import Tensor, nn

import fedloom as fl

LIMIT = 5_000_000
PLAIN = {"mlp": (30,), "fedmap_mlp": (30,), "femnist_cnn": (1, 28, 28), "resnet9": (1, 28, 28), "convnet3": (1, 28, 28)}
STREETS = ("deeplabv3plus_resnet18", "topformer_t", "topformer_s", "topformer_b", "seaformer_t", "seaformer_s")
SIZE = (64, 96)


def networks() -> Iterator[tuple[str, Callable[[], nn.Module], tuple[int, ...]]]:
    """Name, network and shape of a row of those that are small enough."""
    for name in fl.models.MODELS:
        dense = name in STREETS
        shape = (3, *SIZE) if dense else PLAIN.get(name, (3, 224, 224) if name == "office_cnn" else (3, 32, 32))
        classes = 2 if name == "fedmap_mlp" else 10

        def make(name: str = name, shape: tuple[int, ...] = shape, classes: int = classes) -> nn.Module:
            return fl.models.build(name, num_classes=classes, sample_shape=shape)

        if sum(p.numel() for p in make().parameters()) < LIMIT:
            yield name, make, shape


def data_for(name: str, shape: tuple[int, ...], batch: int) -> list[tuple[Tensor, Tensor]]:
    """Two clients of three batches; four where a step is short."""
    clients, batches = (2, 3) if len(shape) == 3 else (4, 20)
    made = tables(clients, batches * batch, shape, 2 if name == "fedmap_mlp" else 10)
    if name not in STREETS:
        return made
    return [(x, y[:, None, None].expand(-1, *SIZE).contiguous()) for x, y in made]


def logit_loss(output: Tensor, y: Tensor) -> Tensor:
    """For the network that returns one logit."""
    return F.binary_cross_entropy_with_logits(output.squeeze(1), y.to(output.dtype))


def main() -> None:
    cpus = os.cpu_count() or 1
    lines = [HEADER]
    for name, make, shape in networks():
        for batch in (8, 64):
            if name in STREETS and batch > 8:
                continue  # batches of 64 street scenes are a GPU's work
            torch.set_num_threads(cpus)
            task = "binary" if name == "fedmap_mlp" else "segmentation" if name in STREETS else "classification"
            times = beside(
                make,
                data_for(name, shape, batch),
                logit_loss if task == "binary" else F.cross_entropy,
                lambda p: torch.optim.SGD(p, lr=0.01),
                rounds=5,
                epochs=1,
                batch_size=batch,
                threads=cpus,
                optimizer=fl.sgd(0.01),
                task=task,
                device="cpu",
            )
            lines.append(row(f"{name}, batch {batch}", *times))
            print(lines[-1], flush=True)
    write("shipped_networks", lines)


if __name__ == "__main__":
    main()
