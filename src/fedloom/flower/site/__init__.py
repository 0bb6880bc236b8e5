"""A site of a deployment."""
