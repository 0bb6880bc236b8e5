"""Cohorts on one GPU beside a hand-written loop, in one process: networks, methods, precisions, unequal clients.

    python benchmarks/gpu.py                     # everything (about four minutes on an H200)
    python benchmarks/gpu.py --only networks methods

Images are CIFAR-shaped bytes on the device, batch 64, one local epoch, SGD; rows of the perceptron are numbers, batch 32, Adam. The loop has
its data on the device and torch's default precision; so has fedloom in fp32. Medians of rounds from the third on.
"""

from __future__ import annotations

import argparse
import copy
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from lib import others
from lib.side import HandWritten, State
from torch import Tensor, nn

import fedloom as fl
from fedloom.engines.vectorised import VectorisedEngine

RESULTS = Path(__file__).parent / "results"
Make = Callable[[], nn.Module]
LONG = 2.0
"""Seconds of a hand-written round above which two of them are enough."""


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(30, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 2))


def pictures(sizes: Sequence[int], shape: tuple[int, ...] = (3, 32, 32), classes: int = 10) -> list[tuple[Any, Any]]:
    """Clients of random byte images; with a label per picture, or per pixel for larger ones."""
    draw = np.random.default_rng(0)
    labels = (
        (lambda n: draw.integers(0, classes, n))
        if shape[1] == 32
        else (lambda n: draw.integers(0, classes, (n, *shape[1:])))
    )
    return [(draw.integers(0, 255, (n, *shape), dtype=np.uint8), labels(n)) for n in sizes]


def rows(clients: int) -> list[tuple[Any, Any]]:
    """Clients of random numbers."""
    draw = np.random.default_rng(0)
    return [(draw.normal(size=(1400, 30)).astype("f4"), draw.integers(0, 2, 1400)) for _ in range(clients)]


class OnDevice(HandWritten):
    """The hand-written loop as one would write it for a GPU: rows, orders and a copy of the model for each client are there."""

    def __init__(self, make: Make, data: Sequence[tuple[Any, Any]], cohort: int, batch: int, adam: bool, device: str):
        torch.manual_seed(0)
        model = make().to(device)
        on_device = [(torch.from_numpy(x).to(device), torch.from_numpy(y).to(device)) for x, y in data]
        optimizer = partial(torch.optim.Adam, lr=1e-3) if adam else partial(torch.optim.SGD, lr=0.05)
        super().__init__(model, on_device, F.cross_entropy, optimizer, 1, batch)
        self.cohort, self.device, self.made = cohort, device, 0

    def taking_part(self) -> Sequence[tuple[Tensor, Tensor]]:
        return [self.data[k] for k in self.chosen]

    def local(self) -> nn.Module:
        return copy.deepcopy(self.model).train()

    def order(self, rows: int) -> Tensor:
        return torch.randperm(rows, device=self.device)

    def inputs(self, x: Tensor) -> Tensor:
        return x.float() / 255 if x.dtype is torch.uint8 else x

    def averaged(self, found: Iterable[tuple[State, int]]) -> State:
        states = [state for state, _ in found]
        self.model.load_state_dict({n: sum(s[n] for s in states) / self.cohort for n in states[0]})
        return self.shared

    def timed(self) -> tuple[float, float]:
        self.chosen = np.random.default_rng(self.made).choice(len(self.data), self.cohort, replace=False)
        self.made += 1
        self.settle()
        begun, spent = time.perf_counter(), time.process_time()
        self.round()
        self.settle()
        return time.perf_counter() - begun, time.process_time() - spent

    def settle(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def by_hand(
    make: Make,
    data: Sequence[tuple[Any, Any]],
    cohort: int,
    batch: int,
    adam: bool,
    rounds: int = 3,
    device: str = "cuda",
) -> float:
    """Seconds a round of FedAvg as one would write it; the fastest of three, of two where they are long."""
    hand = OnDevice(make, data, cohort, batch, adam, device)
    taken = [hand.timed()[0] for _ in range(2)]
    return min(taken if taken[1] > LONG else [*taken, *(hand.timed()[0] for _ in range(rounds - 2))])


def fitted(
    method: str,
    make: Make,
    data: Sequence[tuple[Any, Any]],
    cohort: int,
    batch: int,
    adam: bool,
    precision: str,
    *,
    rounds: int = 10,
    callbacks: Sequence[Callable[[dict[str, Any]], object]] = (),
) -> fl.Result:
    """A run of fedloom, nothing evaluated before its end."""
    task = "segmentation" if data[0][1].ndim > 1 else "classification"
    federation = fl.Federation.from_arrays([((x, y), (x[:4], y[:4])) for x, y in data])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fl.fit(
            method,
            make,
            federation,
            task=task,
            rounds=rounds,
            cohort=cohort,
            epochs=1,
            batch_size=batch,
            optimizer=fl.adam(1e-3) if adam else fl.sgd(0.05),
            engine=VectorisedEngine(),
            device="cuda",
            precision=precision,
            evaluate={"every": 0},
            progress=False,
            callbacks=callbacks,
        )


def ours(
    method: str, make: Make, data: Sequence[tuple[Any, Any]], cohort: int, batch: int, adam: bool, precision: str
) -> float:
    """Seconds a round of fedloom."""
    result = fitted(method, make, data, cohort, batch, adam, precision)
    return statistics.median(r["seconds"] for r in result.history[2:])


def networks() -> list[str]:
    """A table: fedavg on networks and cohorts."""
    images, numbers = pictures([500] * 100), rows(100)
    scenes = pictures([32] * 4, (3, 180, 240), 11)
    cases: dict[str, tuple[Make, Any, int, int, bool]] = {
        "pfllib_cnn, 10 clients": (fl.models.pfllib_cnn, images, 10, 64, False),
        "pfllib_cnn, 50 clients": (fl.models.pfllib_cnn, images, 50, 64, False),
        "convnet4, 10 clients": (fl.models.convnet4, images, 10, 64, False),
        "convnet4, 50 clients": (fl.models.convnet4, images, 50, 64, False),
        "resnet18 (BatchNorm), 10 clients": (fl.models.resnet18, images, 10, 64, False),
        "MLP 30-32-16-2, 100 clients": (perceptron, numbers, 100, 32, True),
        "topformer_t, 240x180, 4 clients, batch 8": (
            partial(fl.models.topformer_t, num_classes=11),
            scenes,
            4,
            8,
            False,
        ),
    }
    return _beside(cases, ("fp32", "tf32", "bf16"))


def strange() -> list[str]:
    """A table: fedavg on networks that nobody tuned anything for."""
    images = pictures([500] * 20)
    texts, signals, numbers = (
        [(x.numpy(), y.numpy()) for x, y in others.data(kind, 20)] for kind in ("texts", "signals", "rows")
    )
    found: dict[str, tuple[Make, Any]] = {
        "LeNet-5": (others.lenet, images),
        "convolutions over time, BatchNorm": (others.heartbeats, signals),
        "perceptron 784-2048-2048-10": (others.wide, numbers),
        "convolutions, GroupNorm, GELU, dropout": (others.grouped, images),
        "LSTM, two layers of 128": (others.Recurrent, texts),
        "transformer, two layers of 64": (others.Transformer, texts),
    }
    found |= {
        name: (make, images) for name, make in others.installed(timm=others.vit, torchvision=others.mobile).items()
    }
    return _beside({name: (make, data, 10, 64, False) for name, (make, data) in found.items()}, ("fp32", "bf16"))


def _beside(cases: dict[str, tuple[Make, Any, int, int, bool]], precisions: Sequence[str]) -> list[str]:
    """A table: fedavg beside the loop."""
    lines = [
        "| network | by hand, s | " + " | ".join(f"{p}, s | ratio" for p in precisions) + " |",
        "|---" * (2 + 2 * len(precisions)) + "|",
    ]
    for name, (make, data, cohort, batch, adam) in cases.items():
        plain = by_hand(make, data, cohort, batch, adam)
        cells = []
        for precision in precisions:
            try:
                seconds = ours("fedavg", make, data, cohort, batch, adam, precision)
                cells.append(f"{seconds:.4f} | {plain / seconds:.1f}")
            except (RuntimeError, ValueError) as error:
                cells.append(f"failed: {str(error).splitlines()[0][:90]} | –")
        lines.append(f"| {name} | {plain:.4f} | " + " | ".join(cells) + " |")
        print(lines[-1], flush=True)
    return lines


def methods() -> list[str]:
    """A table: methods on one network, beside fedavg and what their definition demands."""
    images = pictures([500] * 100)
    demanded = {
        "fedavg": (1.0, "one forward and backward pass a step"),
        "scaffold": (1.0, "the same"),
        "fedmap": (1.33, "the same, and a sweep forward over all rows"),
        "fedavg + lag(k=2)": (1.0, "the same"),
        "fedavg + isr": (1.0, "the same, and the losses at the taps"),
        "fedavg + isr + lag(k=2)": (1.0, "the same, and the losses at the taps"),
        "fedaims": (1.33, "the same, and a sweep forward over all rows"),
        "ditto": (2.0, "two models"),
        "moon": (1.67, "two more forward passes"),
    }
    workload = fl.models.pfllib_cnn, images, 10, 64, False
    plain = by_hand(*workload)
    lines = [
        f"FedAvg by hand: {plain:.4f} s a round; the last column is beside a loop of as many passes.",
        "",
        "| method | s a round | over fedavg | passes demanded | over these | why | ratio |",
        "|---" * 7 + "|",
    ]
    base = None
    for name, (passes, why) in demanded.items():
        seconds = ours(name, *workload, "fp32")
        base = base or seconds
        over = seconds / base
        cells = name, f"{seconds:.4f}", f"{over:.2f}", f"{passes:.2f}", f"{over / passes:.2f}", why
        lines.append(f"| {' | '.join(cells)} | {passes * plain / seconds:.1f} |")
        print(lines[-1], flush=True)
    return lines


def unequal() -> list[str]:
    """Seconds of cohorts of unequal clients beside equal ones of the same total."""
    draw = np.random.default_rng(0)
    shares = np.stack([draw.dirichlet([0.1] * 20) for _ in range(10)])
    sizes = np.maximum(10, (shares * 1000).sum(0)).astype(int).tolist()
    even = [sum(sizes) // len(sizes)] * len(sizes)
    found = [ours("fedavg", fl.models.pfllib_cnn, pictures(s), len(s), 64, False, "fp32") for s in (sizes, even)]
    return [
        "| 20 clients, pfllib_cnn | rows | s a round |",
        "|---|---|---|",
        f"| Dirichlet 0.1 sizes ({min(sizes)} to {max(sizes)}) | {sum(sizes)} | {found[0]:.4f} |",
        f"| equal sizes | {sum(even)} | {found[1]:.4f} |",
    ]


PARTS: dict[str, Callable[[], list[str]]] = {
    "networks": networks,
    "others": strange,
    "methods": methods,
    "unequal": unequal,
}


def main() -> None:
    """Measures and writes the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    chosen = parser.parse_args().only
    if not torch.cuda.is_available():
        print("no CUDA device: nothing to measure")
        return
    lines = [
        f"# gpu, {date.today().isoformat()}",
        "",
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Python {platform.python_version()}. {(__doc__ or '').strip().splitlines()[-2]}",
    ]
    RESULTS.mkdir(exist_ok=True)
    for part in chosen:
        lines += ["", *PARTS[part]()]
        text = "\n".join([*lines, ""])  # after each part: what is stopped keeps what it has
        (RESULTS / f"gpu-{date.today().isoformat()}.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
