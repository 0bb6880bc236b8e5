"""Data sets by name, and their downloads."""
