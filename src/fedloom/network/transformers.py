"""Parts of transformers that torch computes in another way where it is not enough to train one model."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedloom.torch_internals import is_differentiated


class DenseEncoder(nn.TransformerEncoder):
    """``nn.TransformerEncoder`` without nested tensors.

    Torch makes them of padded sequences outside of training. They have no shape that taps could read and no rule for
    ``vmap``, and positions of padding are zeros in them, which they are not in training.
    """

    @property
    def use_nested_tensor(self) -> bool:  # type: ignore[override]
        """Never; what torch has written into the instance is hidden, not changed."""
        return False


class TwiceLayerNorm(nn.LayerNorm):
    """``nn.LayerNorm`` that can be differentiated twice for many clients.

    Of a gradient inside ``vmap``, torch's own forgets that the gradient of the weight depends on the input.
    """

    def forward(self, input: Tensor) -> Tensor:
        if not is_differentiated(input) or self.weight is None:
            return super().forward(input)
        x = input.to(self.weight.dtype)
        axes = tuple(range(-len(self.normalized_shape), 0))
        centred = x - x.mean(axes, keepdim=True)
        y = centred * torch.rsqrt(centred.square().mean(axes, keepdim=True) + self.eps) * self.weight
        return y if self.bias is None else y + self.bias
