"""A batch: rows of one client, with a mask for padding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedloom.tensors import Inputs


@dataclass(frozen=True, slots=True)
class Batch:
    """Some rows of one client.

    Args:
        x: inputs; axis 0 is the row.
        y: targets.
        mask: 1 for real rows, 0 for padding; None when every row is real.
        pair: the second batch of a step that needs two (``Sampler(group=2)``).
    """

    x: Inputs
    y: Tensor
    mask: Tensor | None = None
    pair: Batch | None = None

    def mean(self, values: Tensor) -> Tensor:
        """Mean over the real rows of one value per row: ``sum(w l) / sum(w)``."""
        if self.mask is None:
            return values.mean()
        mask = self.mask.to(values.dtype)
        return (values * mask).sum() / mask.sum().clamp(min=1)

    def sum(self, values: Tensor) -> Tensor:
        """Sum over the real rows; ``values`` may have further axes, which stay."""
        return values.sum(0) if self.mask is None else (values * self._column(values)).sum(0)

    def count(self) -> Tensor:
        """Number of real rows, as a tensor."""
        if self.mask is None:
            return torch.full((), float(self.y.shape[0]), device=self.y.device)
        return self.mask.sum()

    def packed(self) -> dict[str, Any]:
        """As a dictionary of tensors, which transforms of torch understand."""
        parts: dict[str, Any] = {"x": self.x, "y": self.y}
        if self.mask is not None:
            parts["mask"] = self.mask
        if self.pair is not None:
            parts["pair"] = self.pair.packed()
        return parts

    @staticmethod
    def unpacked(parts: Mapping[str, Any]) -> Batch:
        """The inverse of :meth:`packed`."""
        pair = parts.get("pair")
        return Batch(parts["x"], parts["y"], parts.get("mask"), None if pair is None else Batch.unpacked(pair))

    def one_hot(self, classes: int, dtype: torch.dtype | None = None) -> Tensor:
        """Rows x classes, zero in padding rows (``F.one_hot`` cannot be mapped)."""
        hot = (self.y[:, None] == torch.arange(classes, device=self.y.device)).to(dtype or torch.get_default_dtype())
        return hot if self.mask is None else hot * self._column(hot)

    def by_class(self, values: Tensor, classes: int) -> Tensor:
        """Sum of ``values`` over the real rows of each class: classes x dimension."""
        return self.one_hot(classes, values.dtype).T @ values

    def _column(self, values: Tensor) -> Tensor:
        assert self.mask is not None
        return self.mask.to(values.dtype).reshape(-1, *[1] * (values.dim() - 1))
