"""The format number of files and messages that the package reads back."""

from __future__ import annotations

from fedloom.errors import UserError

FORMAT = 1
"""The format of run folders, checkpoints, models, comparisons, experiments and messages."""


def check_format(name: object, number: object, action: str) -> None:
    """Raise a UserError unless a format number is :data:`FORMAT`.

    Args:
        name: the file.
        number: its format number, or the text of it; None for a file without one.
        action: sentence that says what the user can do.

    Example:
        >>> check_format("run.toml", 2, "Run it again.")
        Traceback (most recent call last):
        ...
        fedloom.errors.UserError: run.toml has format 2; expected format 1. Run it again.
    """
    if str(number) != str(FORMAT):
        raise UserError(f"{name} has format {number}; expected format {FORMAT}. {action}")
