"""Secure aggregation: the server learns the sum over several sites, and nothing of a single site.

``docs/threats.md`` describes its protection and its limits.
"""

from medfedaug.hospital.secure.aggregation import MaskedAggregation, MaskedDelivery
from medfedaug.hospital.secure.layout import SumLayout

__all__ = ["MaskedAggregation", "MaskedDelivery", "SumLayout"]
