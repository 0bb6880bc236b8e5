"""Comparisons: methods by seeds by swept options, each cell an ordinary run; what they say together, as tables."""

from fedloom.comparison.cell import Cell
from fedloom.comparison.compare_methods import compare
from fedloom.comparison.record import Comparison, load_comparison

__all__ = ["Cell", "Comparison", "compare", "load_comparison"]
