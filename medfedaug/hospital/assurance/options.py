"""`CalibrationOptions`: what is promised, and of which cases."""

from typing import ClassVar

from medfedaug.config.options import Settings, setting, settings

VOLUME, LESIONS, CLASSES = "volume", "lesions", "classes"
"""Risks: the missed share of the volume, or of the connected parts; a set of classes without the true one."""


@settings
class CalibrationOptions(Settings):
    """Settings of a calibration."""

    PANEL: ClassVar[str] = "The promise"

    miss: float = setting(
        0.1,
        "Largest share that may be missed: of a structure, or of the images whose set lacks the true class.",
        above=0,
        below=1,
    )
    confidence: float | None = setting(
        None,
        "Confidence that the mean over all patients keeps the promise. By default the promise holds in the "
        "mean over calibrations and patients.",
        above=0,
        below=1,
    )
    risk: str = setting(
        VOLUME,
        "Missed share of a structure's volume, or of its connected parts (lesions).",
        choices=(VOLUME, LESIONS),
    )
    structures: tuple[str, ...] = setting(
        (), "Structure to promise; repeatable. By default all.", flags=("--structure",)
    )
    split: str = setting(
        "validation",
        "Cases to calibrate on. Validation cases chose the round of the model; test cases did not.",
        choices=("validation", "test"),
    )
    device: str = setting("auto", "cpu, cuda, cuda:1, ..., or auto: CUDA if available.")
