"""Client-level differential privacy."""
