"""Reports: what runs look like, as one HTML page and as pictures of dense prediction."""

from fedloom.reports.making import report
from fedloom.reports.pictures import pictures

__all__ = ["pictures", "report"]
