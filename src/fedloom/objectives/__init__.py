"""Terms that recipes and plug-ins are built from."""

from fedloom.objectives.terms import data_term, inner_product, quadratic

__all__ = ["data_term", "inner_product", "quadratic"]
