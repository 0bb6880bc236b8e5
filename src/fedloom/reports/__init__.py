"""Reports: what runs look like, as one HTML page and as pictures of dense prediction."""

from fedloom.reports.make_report import report
from fedloom.reports.segmentation_pictures import pictures

__all__ = ["pictures", "report"]
