"""The Flower engine: the same client programs and server stages, over messages to sites.

Needs the extra ``flower`` (``pip install "fedloom[flower]"``).
"""

import warnings

try:
    with warnings.catch_warnings():
        # Of what Flower imports in turn: nothing that a user of fedloom could do about.
        warnings.simplefilter("ignore", DeprecationWarning)
        import flwr.app
        import flwr.clientapp
        import flwr.serverapp  # noqa: F401
except ImportError as error:  # the core runs without it
    from fedloom.errors import UserError

    raise UserError('the engine "flower" needs Flower: pip install "fedloom[flower]"') from error

from fedloom.flower.engine import FlowerEngine
from fedloom.flower.local import LocalEngine

__all__ = ["FlowerEngine", "LocalEngine"]
