"""The contract of a method."""
