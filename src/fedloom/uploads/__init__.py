"""Upload stages that recipes are built from."""

from fedloom.uploads.model import send_model

__all__ = ["send_model"]
