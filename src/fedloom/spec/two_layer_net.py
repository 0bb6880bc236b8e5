"""Small nets that plug-ins bring as extra leaves."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedloom import ops
from fedloom.tensors import Leaves


def two_layers(name: str, inputs: int, hidden: int, outputs: int, generator: np.random.Generator) -> Leaves:
    """Leaves of ``W2 relu(W1 x + b1) + b2``, initialised as ``torch.nn.Linear``: uniform within ``1/sqrt(inputs)``."""
    found: Leaves = {}
    for i, (wide, narrow) in enumerate(((inputs, hidden), (hidden, outputs))):
        bound = wide**-0.5
        found[f"{name}.{i}.weight"] = torch.from_numpy(generator.uniform(-bound, bound, (narrow, wide)))
        found[f"{name}.{i}.bias"] = torch.from_numpy(generator.uniform(-bound, bound, narrow))
    return found


def apply_two_layers(leaves: Leaves, name: str, x: Tensor) -> Tensor:
    """``W2 relu(W1 x + b1) + b2`` of the leaves that begin with ``name``."""
    hidden = torch.relu(ops.linear(x, leaves[f"{name}.0.weight"], leaves[f"{name}.0.bias"]))
    return ops.linear(hidden, leaves[f"{name}.1.weight"], leaves[f"{name}.1.bias"])
