"""Reports: what a run looks like."""

from fedloom.report.pictures import pictures

__all__ = ["pictures"]
