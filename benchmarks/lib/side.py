"""A hand-written FedAvg loop, and fedloom beside it in the same process, round by round in turn."""

from __future__ import annotations

import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import fedloom as fl

Loss = Callable[[Tensor, Tensor], Tensor]
State = dict[str, Tensor]
RESULTS = Path(__file__).parent.parent / "results"


class HandWritten:
    """FedAvg as one would write it: torch.optim, one index tensor per batch, clients one after another."""

    def __init__(
        self,
        model: nn.Module,
        data: Sequence[tuple[Tensor, Tensor]],
        loss: Loss,
        optimizer: Callable[[Any], torch.optim.Optimizer],
        epochs: int,
        batch_size: int,
    ) -> None:
        self.model, self.data, self.loss, self.optimizer = model, data, loss, optimizer
        self.epochs, self.batch_size = epochs, batch_size
        self.draw = np.random.default_rng(0)
        self.shared = {k: v.detach().clone() for k, v in model.state_dict().items()}

    def round(self) -> None:
        self.shared = self.averaged(self.trained(x, y) for x, y in self.taking_part())

    def trained(self, x: Tensor, y: Tensor) -> tuple[State, int]:
        """A client's state after its epochs, and its rows."""
        model = self.local()
        optimizer = self.optimizer(model.parameters())
        for _ in range(self.epochs):
            order = self.order(len(y))
            for start in range(0, len(y), self.batch_size):
                index = order[start : start + self.batch_size]
                optimizer.zero_grad()
                self.loss(model(self.inputs(x[index])), y[index]).backward()
                optimizer.step()
        return model.state_dict(), len(y)

    # How it is done on a CPU; benchmarks/gpu.py does it as one would on a device.

    def taking_part(self) -> Sequence[tuple[Tensor, Tensor]]:
        return self.data

    def local(self) -> nn.Module:
        self.model.load_state_dict(self.shared)
        return self.model.train()

    def order(self, rows: int) -> Tensor:
        return torch.from_numpy(self.draw.permutation(rows))

    def inputs(self, x: Tensor) -> Tensor:
        return x

    def averaged(self, found: Iterable[tuple[State, int]]) -> State:
        """The mean by rows, added up client by client because they share one module."""
        total = sum(len(y) for _, y in self.data)
        mean = {k: torch.zeros_like(v) for k, v in self.shared.items()}
        for state, rows in found:
            for k, v in state.items():
                if v.is_floating_point():
                    mean[k] += v * (rows / total)
        return mean

    def timed(self) -> tuple[float, float]:
        begun, spent = time.perf_counter(), time.process_time()
        self.round()
        return time.perf_counter() - begun, time.process_time() - spent


@dataclass(slots=True)
class Times:
    """Seconds of rounds: by the clock, and of this process's processor time (which a busy machine disturbs less)."""

    wall: list[float]
    processor: list[float]


def tables(clients: int, rows: int, shape: tuple[int, ...], classes: int, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Random rows whose labels depend on them."""
    draw = torch.Generator().manual_seed(seed)
    plane = torch.randn(int(np.prod(shape)), classes, generator=draw)
    made = []
    for _ in range(clients):
        x = torch.randn(rows, *shape, generator=draw)
        made.append((x, (x.flatten(1) @ plane).argmax(1)))
    return made


def beside(
    model: Callable[[], nn.Module],
    data: Sequence[tuple[Tensor, Tensor]],
    loss: Loss,
    theirs: Callable[[Any], torch.optim.Optimizer],
    *,
    rounds: int,
    epochs: int,
    batch_size: int,
    threads: int | None = None,
    **options: Any,
) -> tuple[Times, Times]:
    """Seconds a round by hand and by fedloom, taken in turn; the first round of each is left out.

    Args:
        threads: intra-op threads of the hand-written rounds; None leaves them as they are.
    """
    hand = HandWritten(model(), data, loss, theirs, epochs, batch_size)
    by_hand: list[tuple[float, float]] = []
    ours: list[float] = []
    cpu: list[float] = []
    last = [0.0]

    def callback(record: dict[str, Any]) -> None:
        ours.append(record["seconds"])
        cpu.append(time.process_time() - last[0])
        before = torch.get_num_threads()
        if threads is not None:
            torch.set_num_threads(threads)
        by_hand.append(hand.timed())
        torch.set_num_threads(before)
        last[0] = time.process_time()

    federation = fl.Federation.from_arrays([((x, y), (x[:8], y[:8])) for x, y in data])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fl.fit(
            "fedavg",
            model,
            federation,
            rounds=rounds + 1,
            epochs=epochs,
            batch_size=batch_size,
            evaluate={"every": 0},
            progress=False,
            callbacks=[callback],
            **options,
        )
    return Times([w for w, _ in by_hand[1:]], [c for _, c in by_hand[1:]]), Times(ours[1:], cpu[1:])


def row(name: str, by_hand: Times, ours: Times) -> str:
    """A line of a table: medians of wall and processor seconds and their ratios (above 1: fedloom is faster)."""
    (a, c), (b, d) = ((statistics.median(t.wall), statistics.median(t.processor)) for t in (by_hand, ours))
    return f"| {name} | {a:.4f} | {b:.4f} | {a / b:.2f} | {c:.4f} | {d:.4f} | {c / d:.2f} |"


HEADER = "| case | by hand, s | fedloom, s | ratio | by hand, CPU s | fedloom, CPU s | CPU ratio |\n|---|---|---|---|---|---|---|"


def write(name: str, lines: Sequence[str]) -> None:
    """Prints a table and keeps it under its date, with the hardware."""
    info = Path("/proc/cpuinfo")
    lines_of = info.read_text().splitlines() if info.exists() else []
    cpu = next((s.split(":")[1].strip() for s in lines_of if s.startswith("model name")), platform.machine())
    head = [
        f"# {name}, {date.today().isoformat()}",
        "",
        f"{cpu}, {torch.get_num_threads()} intra-op threads, torch {torch.__version__}, Python {platform.python_version()}. "
        "Medians of rounds taken in turn in one process, first round left out; ratio above 1: fedloom is faster. "
        f"Load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors. "
        "CPU seconds are this process's own: they leave out other people's work, and that of worker processes.",
        "",
    ]
    text = "\n".join([*head, *lines, ""])
    print(text)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}-{date.today().isoformat()}.md").write_text(text)
