"""Recipes: named methods, each a composition of parts."""

from fedloom.methods.alignment import fedas
from fedloom.methods.averaging import fedavg, fedprox, local, local_full, scaffold
from fedloom.methods.collaboration import fedcac, fedpac
from fedloom.methods.condensation import fedaf
from fedloom.methods.feature_level import feddbe, fedrod, gpfl
from fedloom.methods.fine_tuning import fedavg_ft, fedbabu, lg_fedavg
from fedloom.methods.global_classes import balancefl, fedgau, fedir
from fedloom.methods.global_drift import feddyn, fedntd
from fedloom.methods.global_features import fedintr, fedproto, moon
from fedloom.methods.layerwise import fedavg_then_local, fedlag
from fedloom.methods.local_blending import fedala
from fedloom.methods.meta import peravg
from fedloom.methods.personalised import ditto, fedbn, fedper, fedrep
from fedloom.methods.posterior import fedmap
from fedloom.methods.server_opt import fedadam, fedavgm, fedexp, fednova, fedyogi, qfedavg
from fedloom.methods.supervised import fedaims, fedaims_full, omniisr
from fedloom.methods.two_models import apfl, pfedme

__all__ = [
    "apfl",
    "balancefl",
    "ditto",
    "fedadam",
    "fedaf",
    "fedaims",
    "fedaims_full",
    "fedala",
    "fedas",
    "fedavg",
    "fedavg_ft",
    "fedavg_then_local",
    "fedavgm",
    "fedbabu",
    "fedbn",
    "fedcac",
    "feddbe",
    "feddyn",
    "fedexp",
    "fedgau",
    "fedintr",
    "fedir",
    "fedlag",
    "fedmap",
    "fednova",
    "fedntd",
    "fedpac",
    "fedper",
    "fedproto",
    "fedprox",
    "fedrep",
    "fedrod",
    "fedyogi",
    "gpfl",
    "lg_fedavg",
    "local",
    "local_full",
    "moon",
    "omniisr",
    "peravg",
    "pfedme",
    "qfedavg",
    "scaffold",
]
