"""Reports: runs as one HTML page, and pictures of segmentation."""

from fedloom.reports.make_report import report
from fedloom.reports.segmentation_pictures import pictures

__all__ = ["pictures", "report"]
