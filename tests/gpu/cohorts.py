"""Two clients of a network, and a comparison with unfused layers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fedloom.engines.choose_device import choose_device
from fedloom.network import functional, inspect_model
from fedloom.ops import forward_context
from fedloom.tensors import Leaves
from tests.gpu.helpers import DEVICE, random

pytest.importorskip("triton")
from fedloom.gpu import fuse_layers


class Cohort:
    """Two clients of a network; a call returns outputs, features, gradients and buffers of a training pass."""

    def __init__(self, module: nn.Module, *, precision: str = "fp64") -> None:
        x, device = random(2, 3, 8, 10).detach(), choose_device(DEVICE, precision)
        self.net = inspect_model.build(module, x, task="classify", device=device)

    def __call__(
        self, wanted: str = "", *, mask: bool = True, train: bool = True, still: str = ""
    ) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(0)
        noise = {n: torch.randn(2, *v.shape, generator=draw).to(v) for n, v in self.net.start.items()}
        leaves = {
            n: torch.stack([v, v]) + (0.3 * noise[n] if v.is_floating_point() else 0) for n, v in self.net.start.items()
        }
        leaves = {n: v.abs() if "running" in n else v for n, v in leaves.items()}
        names = {i.name for i in self.net.structure.leaves if i.trainable}
        for n in names:
            leaves[n].requires_grad_()
        x = random(2, 5, 3, 8, 10).detach().to(self.net.structure.dtype)
        rows = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 0, 0]], device=DEVICE).to(x.dtype)
        self.net.want(frozenset(wanted.split()))

        def out(x: Tensor, leaves: dict[str, Tensor], rows: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            frame = forward_context.Frame(mask=rows if mask else None, wanted=frozenset(wanted.split()))
            y = self.net(leaves, x, frame, train=train, still=frozenset(still.split()))
            return y, frame.features

        y, features = torch.vmap(out)(x, leaves, rows)
        assert set(features) == set(wanted.split())
        loss = sum(((v * rows.reshape(2, 5, *[1] * (v.dim() - 2))) ** 2).sum() for v in (y, *features.values()))
        grads = torch.autograd.grad(loss, [leaves[n] for n in sorted(names)])
        rest = {f"buffer {n}": v for n, v in leaves.items() if n not in names}
        return {"y": y, **features, **dict(zip(sorted(names), grads, strict=True)), **rest}


def without_fusion(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let containers run their layers one by one."""
    monkeypatch.setattr(fuse_layers, "_run_fused", lambda *_: None)


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list of the fused layers that run from now on."""
    calls: list[str] = []
    for name in ("norm_relu_pool", "relu_pool"):
        fn, argument = getattr(fuse_layers, name), 5 if name.startswith("norm") else 1

        def spy(*args, fn=fn, argument=argument, name=name, **options):
            calls.append(f"{name} {args[argument][0]}x{args[argument][1]}")
            return fn(*args, **options)

        monkeypatch.setattr(fuse_layers, name, spy)
    return calls


def compare_with_unfused(
    cohort: Cohort, monkeypatch: pytest.MonkeyPatch, *args, scale: float = 1e-9, **options
) -> None:
    """Compare a call with fused layers and one without."""
    ours = cohort(*args, **options)
    with monkeypatch.context() as m:
        without_fusion(m)
        theirs = cohort(*args, **options)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name].dtype == value.dtype
        assert ours[name].shape == value.shape
        assert torch.allclose(ours[name], value, atol=scale, rtol=scale), name


def run_stacked(
    built: functional.Network, leaves: Leaves, mine: Leaves, x: Tensor, wanted: str, *, gradient: bool
) -> list[Tensor]:
    """Return outputs and requested features of stacked clients in evaluation mode; ``mine`` are the stacked leaves."""
    built.want(frozenset(wanted.split()))

    def out(x: Tensor, mine: Leaves) -> tuple[Tensor, Leaves]:
        frame = forward_context.Frame(wanted=frozenset(wanted.split()))
        return built({**leaves, **mine}, x, frame, train=False), frame.features

    with torch.set_grad_enabled(gradient):
        y, features = torch.vmap(out)(x, mine)
    return [y, *features.values()]
