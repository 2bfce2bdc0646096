"""Layers, networks that MONAI lacks, and the insertion of layers into networks that MONAI has."""

from medfedaug.models.adaptation import (
    InstanceAdapter,
    insert_instance_adapters,
    instance_adapters,
    training_adapters,
)
from medfedaug.models.ffa import FFALayer
from medfedaug.models.insertion import (
    ffa_layers,
    insert_ffa,
    insert_layers,
    remove_ffa,
    remove_layers,
    stage_layers,
)
from medfedaug.models.networks import build_network, network_names
from medfedaug.models.stages import StageLayer, find_head

__all__ = [
    "FFALayer",
    "InstanceAdapter",
    "StageLayer",
    "build_network",
    "ffa_layers",
    "find_head",
    "insert_ffa",
    "insert_instance_adapters",
    "insert_layers",
    "instance_adapters",
    "network_names",
    "remove_ffa",
    "remove_layers",
    "stage_layers",
    "training_adapters",
]
