"""The operators of :mod:`fedloom.ops.dispatch` that have an implementation in this package."""

from __future__ import annotations

from fedloom.gpu.batch_norm import batch_norm
from fedloom.gpu.classifier_loss import classifier_loss
from fedloom.gpu.counter_noise import fold_key, random_bits
from fedloom.gpu.cross_entropy import cross_entropies, mean_cross_entropy
from fedloom.gpu.fuse_layers import fuse_layers
from fedloom.gpu.linear import linear
from fedloom.gpu.optimizers import optimizer_step
from fedloom.gpu.patch_convolution import convolution
from fedloom.gpu.recurrent_cells import gru_cell_backward, lstm_cell_backward, recurrent_cell
from fedloom.gpu.squared_distance import difference_inner_product, half_squared_distance, squared_norm
from fedloom.gpu.tap_summary import channel_summary
from fedloom.gpu.tf32x3 import matmul_transposed, transpose_weight, weight_gradient
from fedloom.ops import dispatch


def register() -> None:
    """Register each implementation for the operator of its name."""
    dispatch.register(
        batch_norm,
        channel_summary,
        classifier_loss,
        convolution,
        cross_entropies,
        difference_inner_product,
        fold_key,
        fuse_layers,
        gru_cell_backward,
        half_squared_distance,
        linear,
        lstm_cell_backward,
        matmul_transposed,
        mean_cross_entropy,
        optimizer_step,
        random_bits,
        recurrent_cell,
        squared_norm,
        transpose_weight,
        weight_gradient,
    )
