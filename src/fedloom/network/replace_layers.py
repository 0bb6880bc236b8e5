"""Turns the layers of a model into those of :mod:`fedloom.network.layers`, and back."""

from __future__ import annotations

from torch import nn

from fedloom.network.layers import (
    CohortConv2d,
    CohortLinear,
    CounterDropout,
    CounterDropout1d,
    CounterDropout2d,
    CounterDropout3d,
    MappedEmbedding,
    MaskedBatchNorm1d,
    MaskedBatchNorm2d,
    MaskedBatchNorm3d,
)
from fedloom.network.recurrent import MappedGRU, MappedLSTM, MappedRNN
from fedloom.network.transformers import DenseEncoder, TwiceLayerNorm
from fedloom.ops import operator
from fedloom.torch_internals import reset_flat_weights

_SWAPS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Conv2d: CohortConv2d,
    nn.Linear: CohortLinear,
    nn.Embedding: MappedEmbedding,
    nn.Dropout: CounterDropout,
    nn.Dropout1d: CounterDropout1d,
    nn.Dropout2d: CounterDropout2d,
    nn.Dropout3d: CounterDropout3d,
    nn.BatchNorm1d: MaskedBatchNorm1d,
    nn.BatchNorm2d: MaskedBatchNorm2d,
    nn.BatchNorm3d: MaskedBatchNorm3d,
    nn.LSTM: MappedLSTM,
    nn.GRU: MappedGRU,
    nn.RNN: MappedRNN,
    nn.TransformerEncoder: DenseEncoder,
    nn.LayerNorm: TwiceLayerNorm,
}


ADDED = "_fedloom_added"
"""Attribute of a module with the names of the attributes that :func:`fuse_layers` added."""


@operator
def fuse_layers(module: nn.Module) -> None:
    """Let containers run several layers as one kernel. The plain form leaves them as they are."""


def prepare(module: nn.Module) -> None:
    """Turns the layers of a module that have a twin here into it, in place, by exact type."""
    for part in module.modules():
        if type(part) in _SWAPS:
            part.__class__ = _SWAPS[type(part)]
    fuse_layers(module)


def restore(module: nn.Module) -> None:
    """Turns our layers back into torch's, in place: what a user gets is the user's own module."""
    back = {ours: theirs for theirs, ours in _SWAPS.items()}
    for part in module.modules():
        if type(part) in back:
            part.__class__ = back[type(part)]
        if isinstance(part, nn.RNNBase):
            reset_flat_weights(part)
        for name in vars(part).pop(ADDED, ()):
            del vars(part)[name]
