"""MONAI transforms: augmentation of the image itself, in the data pipeline."""

from medfedaug.transforms.fedrdn import FedRDN, FedRDND, FedRDNd, FedRDNDict

__all__ = ["FedRDN", "FedRDND", "FedRDNDict", "FedRDNd"]
