"""What is predicted and how it is judged."""

from fedloom.tasks.base import Task, named
from fedloom.tasks.builtin import TASKS, segmentation

__all__ = ["TASKS", "Task", "named", "segmentation"]
