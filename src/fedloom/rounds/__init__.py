"""The server and the round loop."""
