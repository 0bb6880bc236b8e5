"""Recipes: named methods, each a composition of parts."""

from fedloom.methods.averaging import fedavg, fedprox, local, scaffold
from fedloom.methods.global_features import fedproto
from fedloom.methods.personalised import ditto, fedbn, fedper, fedrep

__all__ = ["ditto", "fedavg", "fedbn", "fedper", "fedproto", "fedprox", "fedrep", "local", "scaffold"]
