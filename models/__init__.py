"""Layers, networks that MONAI lacks, and the insertion of layers into networks that MONAI has."""

from medfedaug.models.ffa import FFALayer
from medfedaug.models.insertion import ffa_layers, insert_ffa, remove_ffa
from medfedaug.models.networks import build_network, network_names

__all__ = ["FFALayer", "build_network", "ffa_layers", "insert_ffa", "network_names", "remove_ffa"]
