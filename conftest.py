"""Where Flower is not installed, the modules that need it are left out of the doctests."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("flwr") else ["src/fedloom/flower/*"]
