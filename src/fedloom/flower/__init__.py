"""The Flower engine and deployments: the same programs and stages, with messages to real sites.

Needs the extra ``flower`` (``pip install "fedloom[flower]"``).
"""

import warnings

try:
    with warnings.catch_warnings():
        # Deprecations in the dependencies of Flower: a user of fedloom cannot resolve them.
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
