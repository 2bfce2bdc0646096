"""MONAI transforms: augmentation of the image itself, in the data pipeline."""

from medfedaug.transforms.amplitude import (
    NormalizeAmplitude,
    NormalizeAmplitudeD,
    NormalizeAmplituded,
    NormalizeAmplitudeDict,
)
from medfedaug.transforms.fedrdn import FedRDN, FedRDND, FedRDNd, FedRDNDict
from medfedaug.transforms.randaugment import RandAugment, RandAugmentD, RandAugmentd, RandAugmentDict

__all__ = [
    "FedRDN",
    "FedRDND",
    "FedRDNDict",
    "FedRDNd",
    "NormalizeAmplitude",
    "NormalizeAmplitudeD",
    "NormalizeAmplitudeDict",
    "NormalizeAmplituded",
    "RandAugment",
    "RandAugmentD",
    "RandAugmentDict",
    "RandAugmentd",
]
