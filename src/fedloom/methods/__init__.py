"""Recipes: named methods, each a composition of parts."""

from fedloom.methods.apfl import apfl
from fedloom.methods.balancefl import balancefl
from fedloom.methods.ditto import ditto
from fedloom.methods.fedadam import fedadam
from fedloom.methods.fedaf import fedaf
from fedloom.methods.fedaims import fedaims, fedaims_full
from fedloom.methods.fedala import fedala
from fedloom.methods.fedas import fedas
from fedloom.methods.fedavg import fedavg
from fedloom.methods.fedavg_ft import fedavg_ft
from fedloom.methods.fedavg_then_local import fedavg_then_local
from fedloom.methods.fedavgm import fedavgm
from fedloom.methods.fedbabu import fedbabu
from fedloom.methods.fedbn import fedbn
from fedloom.methods.fedcac import fedcac
from fedloom.methods.feddbe import feddbe
from fedloom.methods.feddyn import feddyn
from fedloom.methods.fedexp import fedexp
from fedloom.methods.fedgau import fedgau
from fedloom.methods.fedintr import fedintr
from fedloom.methods.fedir import fedir
from fedloom.methods.fedlag import fedlag
from fedloom.methods.fedmap import fedmap
from fedloom.methods.fednova import fednova
from fedloom.methods.fedntd import fedntd
from fedloom.methods.fedpac import fedpac
from fedloom.methods.fedper import fedper
from fedloom.methods.fedproto import fedproto
from fedloom.methods.fedprox import fedprox
from fedloom.methods.fedrep import fedrep
from fedloom.methods.fedrod import fedrod
from fedloom.methods.fedyogi import fedyogi
from fedloom.methods.gpfl import gpfl
from fedloom.methods.lg_fedavg import lg_fedavg
from fedloom.methods.local import local, local_full
from fedloom.methods.moon import moon
from fedloom.methods.omniisr import omniisr
from fedloom.methods.peravg import peravg
from fedloom.methods.pfedme import pfedme
from fedloom.methods.qfedavg import qfedavg
from fedloom.methods.scaffold import scaffold

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
