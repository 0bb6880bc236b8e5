"""Upload stages that recipes are built from."""

from fedloom.uploads.model import send_model, unchanged

__all__ = ["send_model", "unchanged"]
