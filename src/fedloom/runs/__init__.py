"""Runs: options, construction, run folder, result."""
