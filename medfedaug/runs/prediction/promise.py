"""`Promise`: thresholds of a site's calibration, which a prediction applies."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from medfedaug.runs.prediction.input_drift import DriftReference

_FOLDER = "controlled"


@dataclass(frozen=True, eq=False)
class Promise:
    """Thresholds on probabilities, each with the sentence that holds for its maps or sets."""

    thresholds: Mapping[str, float]  # by structure, or a single one for sets of classes
    sentences: Mapping[str, str]  # by structure
    notes: Sequence[str]  # structures without a promise, with the reason
    ranges: DriftReference  # of the calibrated images; another image gets no promise
    # Mean and standard deviation that normalised the calibrated images, if any.
    statistics: Mapping[str, Any] | None
    sha256: str  # hash of the calibration

    def files(self, label: str, classes: Sequence[str]) -> dict[str, str]:
        """Return the file of each structure's controlled map, given the file of the label map."""
        numbers = {name: classes.index(name) for name in self.thresholds}
        plain = {name: re.sub(r"\W+", "_", name) for name in numbers}
        return {name: f"{_FOLDER}/{number}_{plain[name]}/{label}" for name, number in numbers.items()}

    def comment(self, maps: Mapping[str, Mapping[str, Any]]) -> str:
        """Describe the controlled maps of a case, from their entries in the record."""
        return "; ".join(
            f"controlled map of {name}, {entry.get('volume_ml', entry['voxels']):.4g} "
            f"{'ml' if 'volume_ml' in entry else 'voxels'}: {self.sentences[name]}"
            for name, entry in maps.items()
        )

    def differs(self, used: Mapping[str, Any] | None) -> bool:
        """Return whether a prediction normalises images with other statistics."""
        keys = ("mean", "std")
        return any((self.statistics or {}).get(key) != (used or {}).get(key) for key in keys)
