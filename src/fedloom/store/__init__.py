"""What a run leaves on disk: its folder, its checkpoints, its models."""

from fedloom.store.folder import RunFolder
from fedloom.store.loading import load_run

__all__ = ["RunFolder", "load_run"]
