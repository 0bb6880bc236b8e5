"""Turns the layers of a model into those of :mod:`fedloom.layers`, and back."""

from __future__ import annotations

from collections import Counter
from types import MethodType

from torch import nn

from fedloom.chains import Chained, has_chain
from fedloom.encoders import DenseEncoder, TwiceLayerNorm
from fedloom.layers import (
    CohortConv2d,
    CohortLinear,
    CohortMaxPool2d,
    CounterDropout,
    CounterDropout1d,
    CounterDropout2d,
    CounterDropout3d,
    MappedEmbedding,
    MaskedBatchNorm1d,
    MaskedBatchNorm2d,
    MaskedBatchNorm3d,
)
from fedloom.recurrent import MappedGRU, MappedLSTM, MappedRNN

_SWAPS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Conv2d: CohortConv2d,
    nn.Linear: CohortLinear,
    nn.Embedding: MappedEmbedding,
    nn.MaxPool2d: CohortMaxPool2d,
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


def prepare(module: nn.Module) -> None:
    """Turns the layers of a module that have a twin here into it, in place, by exact type; containers then look for chains."""
    for part in module.modules():
        if type(part) in _SWAPS:
            part.__class__ = _SWAPS[type(part)]
    places = Counter(id(child) for part in module.modules() for child in part._modules.values())
    for path, part in module.named_modules():
        inherits = isinstance(part, nn.Sequential) and type(part).forward is nn.Sequential.forward
        if inherits and "forward" not in vars(part) and has_chain(tuple(part._modules.values())):
            alone = [c is not None and places[id(c)] == 1 and "forward" not in vars(c) for c in part._modules.values()]
            names = [f"{path}.{name}" if path else name for name in part._modules]
            vars(part)["_chain_names"] = tuple(n if ok else None for n, ok in zip(names, alone, strict=True))
            vars(part)["_chain_last"] = False
            vars(part)["forward"] = MethodType(Chained.forward, part)


def restore(module: nn.Module) -> None:
    """Turns our layers back into torch's, in place: what a user gets is the user's own module."""
    back = {ours: theirs for theirs, ours in _SWAPS.items()}
    for part in module.modules():
        if type(part) in back:
            part.__class__ = back[type(part)]
        if isinstance(part, nn.RNNBase):
            part._flat_weights = [getattr(part, name) for name in part._flat_weights_names]
        if getattr(vars(part).get("forward"), "__func__", None) is Chained.forward:
            del vars(part)["forward"], vars(part)["_chain_names"], vars(part)["_chain_last"]
