"""The Flower engine: the same client programs and server stages, over messages to sites.

Needs the extra ``flower`` (``pip install "fedloom[flower]"``).
"""

try:
    import flwr as _flwr  # noqa: F401
except ImportError as error:  # the core runs without it
    from fedloom.errors import UserError

    raise UserError('the engine "flower" needs Flower: pip install "fedloom[flower]"') from error

from fedloom.engines.flower.engine import FlowerEngine
from fedloom.engines.flower.local import LocalEngine

__all__ = ["FlowerEngine", "LocalEngine"]
