"""Tasks: losses, statistics and metrics. Batches."""

from fedloom.tasks.base import Task
from fedloom.tasks.builtin import TASKS, named, segmentation

__all__ = ["TASKS", "Task", "named", "segmentation"]
