"""What is measured in a run so that it can be looked at later: the clients' data in outline, the parts of the loss."""

from fedloom.diagnostics.sketch import sketch
from fedloom.diagnostics.terms import term_values

__all__ = ["sketch", "term_values"]
