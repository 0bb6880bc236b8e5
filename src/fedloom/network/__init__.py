"""The user's module as a function of its leaves."""
