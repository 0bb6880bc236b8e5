"""Recipes: named methods, each a composition of parts."""

from fedloom.methods.averaging import fedavg, fedprox, local, scaffold
from fedloom.methods.global_features import fedproto
from fedloom.methods.layerwise import fedavg_then_local, fedlag
from fedloom.methods.local_blending import fedala
from fedloom.methods.personalised import ditto, fedbn, fedper, fedrep
from fedloom.methods.server_opt import fedadam, fedavgm, fedexp, fednova, fedyogi, qfedavg
from fedloom.methods.supervised import omniisr
from fedloom.methods.two_models import apfl, pfedme

__all__ = [
    "apfl",
    "ditto",
    "fedadam",
    "fedala",
    "fedavg",
    "fedavg_then_local",
    "fedavgm",
    "fedbn",
    "fedexp",
    "fedlag",
    "fednova",
    "fedper",
    "fedproto",
    "fedprox",
    "fedrep",
    "fedyogi",
    "local",
    "omniisr",
    "pfedme",
    "qfedavg",
    "scaffold",
]
