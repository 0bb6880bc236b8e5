"""Diagnostics of a run: a sketch of the data, parts of the loss, constants of the theorems."""

from fedloom.rounds.diagnostics.data_sketch import sketch
from fedloom.rounds.diagnostics.loss_terms import information_bounds, term_values

__all__ = ["information_bounds", "sketch", "term_values"]
