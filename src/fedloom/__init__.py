"""fedloom: personalised federated learning on PyTorch, with methods woven from parts that compose."""

from fedloom import data, models
from fedloom.checks import check_method
from fedloom.data import Federation, affine, classes_per_client, dirichlet, iid, natural, quantity, shards
from fedloom.errors import Conflict, FedloomError, NotVectorisable, RunError, UnknownName, UserError
from fedloom.expr import method
from fedloom.gains import gain
from fedloom.methods import (
    apfl,
    ditto,
    fedadam,
    fedala,
    fedavg,
    fedavg_then_local,
    fedavgm,
    fedbn,
    fedexp,
    fedlag,
    fednova,
    fedper,
    fedproto,
    fedprox,
    fedrep,
    fedyogi,
    local,
    omniisr,
    pfedme,
    qfedavg,
    scaffold,
)
from fedloom.optim import adam, adamw, sgd
from fedloom.plugins import clip, control_variates, isr, lag, noise, personal, prototypes, proximal, server_momentum
from fedloom.record import Method, Plugin, compose
from fedloom.registry import describe, list_methods, list_plugins
from fedloom.result import Result
from fedloom.simulation import fit
from fedloom.tasks import Task

__version__ = "0.1.0"

__all__ = [
    "Conflict",
    "Federation",
    "FedloomError",
    "Method",
    "NotVectorisable",
    "Plugin",
    "Result",
    "RunError",
    "Task",
    "UnknownName",
    "UserError",
    "adam",
    "adamw",
    "affine",
    "apfl",
    "check_method",
    "classes_per_client",
    "clip",
    "compose",
    "control_variates",
    "data",
    "describe",
    "dirichlet",
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
    "fit",
    "gain",
    "iid",
    "isr",
    "lag",
    "list_methods",
    "list_plugins",
    "local",
    "method",
    "models",
    "natural",
    "noise",
    "omniisr",
    "personal",
    "pfedme",
    "prototypes",
    "proximal",
    "qfedavg",
    "quantity",
    "scaffold",
    "server_momentum",
    "sgd",
    "shards",
]
