"""The methods that are built in; ``make catalogue`` writes this list from the files beside it."""

from __future__ import annotations

from medfedaug.hospital.methods.dp_fedavg import DPFedAvg as DPFedAvg
