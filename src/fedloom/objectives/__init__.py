"""Terms that recipes and plug-ins are built from."""

from fedloom.objectives.terms import apart, data_term, inner_product, quadratic

__all__ = ["apart", "data_term", "inner_product", "quadratic"]
