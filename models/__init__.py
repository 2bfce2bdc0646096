"""Layers, networks that MONAI lacks, and the insertion of layers into networks that MONAI has."""

from medfedaug.models.adaptation import (
    InstanceAdapter,
    insert_instance_adapters,
    instance_adapters,
    remove_instance_adapters,
    training_adapters,
)
from medfedaug.models.ffa import FFALayer
from medfedaug.models.heads import find_head
from medfedaug.models.insertion import ffa_layers, insert_ffa, remove_ffa
from medfedaug.models.networks import build_network, network_names

__all__ = [
    "FFALayer",
    "InstanceAdapter",
    "build_network",
    "ffa_layers",
    "find_head",
    "insert_ffa",
    "insert_instance_adapters",
    "instance_adapters",
    "network_names",
    "remove_ffa",
    "remove_instance_adapters",
    "training_adapters",
]
