"""Data: federations, data sets, partitions of rows among clients."""

from fedloom.data.augment import Augment
from fedloom.data.client_data import ClientData, Scale, to_float
from fedloom.data.dataset import Dataset
from fedloom.data.federation import Federation, from_folder, from_rows, from_table, read
from fedloom.data.partition import (
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
from fedloom.data.preprocess import Preprocess, Preprocessing
from fedloom.data.readers.masks import from_masks
from fedloom.data.readers.tables import encode_table
from fedloom.data.recordings import chunks
from fedloom.data.rows import Inputs, Rows, concatenate
from fedloom.data.sets.catalogue import DATASETS, load
from fedloom.data.sets.street_scenes import street_scenes
from fedloom.data.sets.synthetic import synthetic

__all__ = [
    "Augment",
    "ClientData",
    "DATASETS",
    "Dataset",
    "Federation",
    "Inputs",
    "PARTITIONS",
    "Partitioner",
    "Preprocess",
    "Preprocessing",
    "Rows",
    "Scale",
    "affine",
    "chunks",
    "classes_per_client",
    "concatenate",
    "dirichlet",
    "encode_table",
    "from_folder",
    "from_masks",
    "from_rows",
    "from_table",
    "iid",
    "load",
    "natural",
    "quantity",
    "read",
    "shards",
    "street_scenes",
    "synthetic",
    "to_float",
]
