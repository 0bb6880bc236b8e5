"""The server of a deployment."""
