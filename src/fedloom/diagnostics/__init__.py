"""What is measured in a run: the clients' data in outline, the parts of the loss, and what the theorems speak of."""

from fedloom.diagnostics.beside import Row, beside, markdown
from fedloom.diagnostics.sketch import sketch
from fedloom.diagnostics.terms import information_bounds, term_values

__all__ = ["Row", "beside", "information_bounds", "markdown", "sketch", "term_values"]
