"""Data: federations, data sets, and how rows are dealt to clients."""

from fedloom.data.dataset import Dataset
from fedloom.data.datasets import DATASETS, load
from fedloom.data.federation import ClientData, Federation, Scale, to_float
from fedloom.data.partitions import (
    PARTITIONS,
    Partitioner,
    affine,
    classes_per_client,
    dirichlet,
    iid,
    natural,
    quantity,
    shards,
)
from fedloom.data.rows import Inputs, Rows, concatenate

__all__ = [
    "DATASETS",
    "PARTITIONS",
    "ClientData",
    "Dataset",
    "Federation",
    "Inputs",
    "Partitioner",
    "Rows",
    "Scale",
    "affine",
    "classes_per_client",
    "concatenate",
    "dirichlet",
    "iid",
    "load",
    "natural",
    "quantity",
    "shards",
    "to_float",
]
