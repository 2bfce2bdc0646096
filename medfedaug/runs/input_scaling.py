"""`Input`: scaling and normalisation of the images of a run, and comparison of two runs' input."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

OTHER_INPUT = "‡"
"""Marks the rows of a table whose input was scaled differently from the reference row's."""

_SCALED = {
    "none": "intensities as stored",
    "each volume": "each volume scaled to [0, 1]",
    "fixed": "intensities divided by 255",
    "bundle": "as the Bundle's transforms give them",
}


@dataclass(frozen=True)
class Input:
    """Scaling and normalisation of a network's input images.

    Attributes:
        scaling: ``"none"``: intensities as stored; ``"each volume"``: scaled to [0, 1] by its range;
            ``"fixed"``: divided by 255, or by 65535 for 16 bits; ``"bundle"``: scaled by a Bundle's
            transforms.
        normalised_by: the method, or "the plan", that normalises the scaled images; ``None`` for none.
    """

    scaling: str = "each volume"
    normalised_by: str | None = None

    @property
    def scaled(self) -> str:
        """Describe the scaling of the images."""
        return _SCALED.get(self.scaling, self.scaling)

    def __str__(self) -> str:
        return f"{self.scaled}, normalised by {self.normalised_by}" if self.normalised_by else self.scaled

    def differs(self, other: Input) -> bool:
        """Return whether two runs scaled images differently; normalisation cancels a fixed factor."""
        if self.scaling == other.scaling:
            return False
        return "each volume" in (self.scaling, other.scaling) or not (
            self.normalised_by or other.normalised_by
        )


SCALED = Input()


def recorded_input(content: Mapping[str, Any]) -> Input:
    """Return the input in a ``results.json``."""
    known = content["input"]
    return Input(
        str(known.get("scaling", "each volume")),
        str(known["normalised_by"]) if known.get("normalised_by") else None,
    )


def input_note(reference: str, inputs: Mapping[str, Input]) -> str:
    """Return the note on rows whose input differs from the reference row's."""
    text = "; ".join(f"{label}: {entry}" for label, entry in inputs.items())
    return (
        f"{OTHER_INPUT} Not the same input as {reference} ({text}): a difference may come of the scaling and "
        "not of the method. Runs that all have --intensity scale, or all raw, differ only by their methods."
    )
