"""Imports of optional packages: the only place where core code reaches them."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any


def is_installed(name: str) -> bool:
    """Return whether the package ``fedloom.<name>`` exists. Does not import it."""
    return importlib.util.find_spec(f"fedloom.{name}") is not None


def load(name: str) -> Any:
    """Import a module of an optional package when a device or an engine asks for it.

    Args:
        name: the module below ``fedloom``, for example ``"gpu.captured_steps"``.

    Raises:
        ModuleNotFoundError: the package was removed, or something that it needs is not installed.
    """
    return importlib.import_module(f"fedloom.{name}")
