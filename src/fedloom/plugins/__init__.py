"""Plug-ins: functions from method to method."""

from fedloom.plugins.aims.aims import aims
from fedloom.plugins.compress import compress
from fedloom.plugins.control_variates import control_variates
from fedloom.plugins.freeze import freeze
from fedloom.plugins.isr import isr
from fedloom.plugins.lag import lag
from fedloom.plugins.map_prior.map_prior import map_prior
from fedloom.plugins.personal import personal
from fedloom.plugins.privacy.privacy import account, clip, noise
from fedloom.plugins.prototypes import prototypes
from fedloom.plugins.proximal import proximal
from fedloom.plugins.robust import robust
from fedloom.plugins.server_momentum import server_momentum

__all__ = [
    "account",
    "aims",
    "clip",
    "compress",
    "control_variates",
    "freeze",
    "isr",
    "lag",
    "map_prior",
    "noise",
    "personal",
    "prototypes",
    "proximal",
    "robust",
    "server_momentum",
]
