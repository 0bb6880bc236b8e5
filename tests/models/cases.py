"""Every shipped network at a size that a test can afford, and the comparisons that several tests make."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedloom import models
from fedloom.models.parts import DropPath


@dataclass(frozen=True)
class Case:
    name: str
    shape: tuple[int, ...]
    classes: int = 5
    options: dict[str, Any] = field(default_factory=dict)
    slow: bool = False

    def make(self, **options: Any) -> nn.Module:
        return models.build(self.name, num_classes=self.classes, sample_shape=self.shape, **{**self.options, **options})

    def batch(self, rows: int = 3, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.randn(rows, *self.shape, dtype=dtype)

    def __str__(self) -> str:
        return "-".join([self.name, *(str(v) for v in self.options.values())])


CLASSIFICATION = [
    Case("mlp", (12,), options={"hidden": (8, 6)}),
    Case("fedmap_mlp", (30,), classes=1),
    Case("convnet3", (1, 9, 8)),
    Case("convnet4", (3, 16, 19)),
    Case("cnn20", (3, 8, 9)),
    Case("pfllib_cnn", (3, 16, 20)),
    Case("femnist_cnn", (1, 8, 12)),
    Case("office_cnn", (3, 63, 70), slow=True),
    Case("resnet9", (1, 9, 12)),
    Case("resnet18", (3, 10, 9)),
    Case("resnet20", (3, 8, 9)),
    Case("resnet20", (3, 8, 9), options={"shortcut": "projection"}),
]
SEGMENTATION = [
    Case("deeplabv3plus_resnet18", (3, 33, 50)),
    Case("deeplabv3plus_resnet18", (3, 33, 50), options={"separable": True}),
    Case("topformer_t", (3, 65, 70)),
    Case("topformer_s", (3, 65, 70)),
    Case("topformer_b", (3, 65, 70)),
    Case("seaformer_t", (3, 65, 70)),
    Case("seaformer_s", (3, 65, 70)),
]
CASES = CLASSIFICATION + SEGMENTATION


def params(cases: list[Case]) -> list[Any]:
    """The cases as pytest parameters, with the large ones marked slow."""
    return [pytest.param(c, id=str(c), marks=[pytest.mark.slow] if c.slow else []) for c in cases]


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def without_noise(model: nn.Module) -> nn.Module:
    """Switch dropout and drop-path off, whatever the mode, so that two passes can be compared."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.forward = lambda x: x
        elif isinstance(module, DropPath):
            module.p = 0.0
    return model


def client_state(case: Case, clients: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Stacked parameters and buffers of clients that differ in all of them."""
    states = [case.make().double().state_dict() for _ in range(clients)]
    for state in states:
        for name, value in state.items():
            if name.endswith("running_var"):
                value.uniform_(0.5, 2.0)
            elif value.is_floating_point() and (value == value.flatten()[0]).all():
                value.add_(0.1 * torch.randn_like(value))
    names = {name for name, _ in case.make().named_parameters()}
    stacked = {name: torch.stack([s[name] for s in states]) for name in states[0]}
    return (
        {n: v for n, v in stacked.items() if n in names},
        {n: v for n, v in stacked.items() if n not in names},
    )


def scores(model: nn.Module, weights: Tensor, leaves: dict[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """A scalar that depends on every output, and the output."""
    out = functional_call(model, leaves, (x,))
    return (out * weights).mean(), out


def assert_close(ours: dict[str, Tensor], theirs: dict[str, Tensor], tol: float) -> None:
    """Per leaf, max|a-b| <= tol * max(max|a|, 1e-3 * largest entry of any leaf)."""
    ours, theirs = ({n: v.detach() for n, v in leaves.items()} for leaves in (ours, theirs))
    largest = max((float(v.abs().max()) for v in theirs.values()), default=0.0)
    for name, value in theirs.items():
        gap = float((ours[name] - value).abs().max())
        assert gap <= tol * max(float(value.abs().max()), 1e-3 * largest), f"{name}: {gap:.2e}"
