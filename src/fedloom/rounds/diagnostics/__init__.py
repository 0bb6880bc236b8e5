"""What is measured in a run: the clients' data in outline, the parts of the loss, and what the theorems speak of."""

from fedloom.rounds.diagnostics.data_sketch import sketch
from fedloom.rounds.diagnostics.loss_terms import information_bounds, term_values

__all__ = ["information_bounds", "sketch", "term_values"]
