"""Which operators of the package have an implementation here."""

from __future__ import annotations

from fedloom.gpu import cells, chains, cohort, counters, crossentropies, entropy, optimizers, products
from fedloom.ops import dispatch


def register() -> None:
    """Enters them."""
    dispatch.register(
        {
            "batch_normalised": cohort.batch_normalised,
            "bits": counters.bits,
            "cell": cells.cell,
            "channel_summary": entropy.channel_summary,
            "convolution": cohort.convolution,
            "cross_entropies": crossentropies.cross_entropies,
            "crossed": products.crossed,
            "fold_one": counters.fold_one,
            "fuse": chains.fuse,
            "gru_back": cells.gru_back,
            "half_squares": products.half_squares,
            "inner_products": products.inner_products,
            "linear": products.linear,
            "lstm_back": cells.lstm_back,
            "mean_cross_entropy": crossentropies.mean_cross_entropy,
            "moved": optimizers.moved,
            "product": products.product,
            "squared_length": products.squared_length,
            "turned": products.turned,
        }
    )
