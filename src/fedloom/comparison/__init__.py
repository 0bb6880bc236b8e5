"""Comparisons: grids of methods, seeds and options. Each cell is an ordinary run."""

from fedloom.comparison.cell import Cell
from fedloom.comparison.compare_methods import compare
from fedloom.comparison.record import Comparison, load_comparison

__all__ = ["Cell", "Comparison", "compare", "load_comparison"]
