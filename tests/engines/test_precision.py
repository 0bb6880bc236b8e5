"""Short types under vmap, where torch's autocast leaves convolutions and normalisation alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import fedloom as fl
from fedloom.engines.vectorised import VectorisedEngine
from fedloom.network.layers import CohortConv2d, CohortLinear
from tests.helpers import everything, federation, fit, shared


class Grouped(nn.Module):
    """Plain, depthwise and padded convolutions; statistics that are tracked; attention-like products."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.depth = nn.Sequential(nn.Conv2d(8, 8, 3, padding="same", groups=8), nn.BatchNorm2d(8), nn.ReLU6())
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.depth(self.stem(x)).flatten(2)
        return self.head((z @ z.transpose(1, 2) / z.shape[-1] @ z).mean(-1))


@pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"))],
)
def test_bf16_is_near_fp32_on_both_engines(device: str) -> None:
    draw = np.random.default_rng(0)
    rows = [(draw.integers(0, 255, (24, 3, 8, 8), np.uint8), draw.integers(0, 3, 24)) for _ in range(3)]
    data = fl.Federation.from_arrays([((x, y), (x[:4], y[:4])) for x, y in rows])
    found = {}
    for engine in ("loop", "mapped"):
        for precision in ("fp32", "bf16"):
            torch.manual_seed(0)
            result = fl.fit(
                "fedavg", Grouped, data, rounds=2, epochs=1, batch_size=8, optimizer=fl.sgd(0.05), precision=precision,
                engine=engine if engine == "loop" else VectorisedEngine(step="mapped"), device=device, progress=False,
            )  # fmt: skip
            found[engine, precision] = torch.cat([v.double().flatten().cpu() for v in everything(result).values()])
    moved = found["loop", "fp32"]
    for case in (("mapped", "fp32"), ("loop", "bf16"), ("mapped", "bf16")):
        near = 1e-4 if case[1] == "fp32" else 3e-2
        assert torch.linalg.norm(found[case] - moved) < near * torch.linalg.norm(moved), case
    assert not torch.equal(found["mapped", "bf16"], found["mapped", "fp32"])


@pytest.mark.parametrize("method", ["fedaims", "fedrod", "balancefl"])
def test_features_in_bf16_are_multiplied_by_leaves(method: str) -> None:
    """Client code reads what layers of a short type return: heads and matrices of its own are of the leaves' type."""
    model, data = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3)), federation()
    long, short = (shared(fit(method, model, data, precision=p, device="cpu", rounds=2)) for p in ("fp32", "bf16"))
    for name, value in long.items():
        torch.testing.assert_close(short[name], value, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("layer", [CohortLinear(6, 4), CohortConv2d(6, 4, 1)], ids=["linear", "convolution"])
def test_layers_return_the_short_type_whoever_has_the_weight(layer: nn.Module, shared: bool) -> None:
    """In a step every client has its own, in an evaluation all may share one: the layers behind see one type."""
    x = torch.randn(3, 5, 6) if isinstance(layer, nn.Linear) else torch.randn(3, 5, 6, 2, 2)
    leaves = {n: p.detach() if shared else p.detach().expand(3, *p.shape) for n, p in layer.named_parameters()}

    def call(x: torch.Tensor, leaves: dict[str, torch.Tensor]) -> torch.Tensor:
        made: torch.Tensor = torch.func.functional_call(layer, leaves, x)
        return made

    with torch.autocast("cpu", torch.bfloat16):
        assert torch.vmap(call, in_dims=(0, None if shared else 0))(x, leaves).dtype == torch.bfloat16
