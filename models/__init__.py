"""Layers, networks that MONAI lacks, and the insertion of layers into networks that MONAI has."""

from medfedaug.models.ffa import FFALayer
from medfedaug.models.insertion import (
    ffa_layers,
    insert_ffa,
    insert_layers,
    remove_ffa,
    remove_layers,
    stage_layers,
)
from medfedaug.models.mixing import FeatureMixLayer, MixStyleLayer, MomentExchangeLayer
from medfedaug.models.networks import build_network, network_names
from medfedaug.models.stage_layer import StageLayer

__all__ = [
    "FFALayer",
    "FeatureMixLayer",
    "MixStyleLayer",
    "MomentExchangeLayer",
    "StageLayer",
    "build_network",
    "ffa_layers",
    "insert_ffa",
    "insert_layers",
    "network_names",
    "remove_ffa",
    "remove_layers",
    "stage_layers",
]
