"""`SeriesObjects`: what is written of a series of files in addition to its label map."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from medfedaug.data.base import Case, SiteFolder
from medfedaug.data.io.base import Segments
from medfedaug.runs.finished_run import FinishedRun
from medfedaug.runs.input_statistics import Origin
from medfedaug.runs.prediction.options import PredictionOptions
from medfedaug.utils.plugins import added_module, added_modules


@dataclass(frozen=True)
class PlainSegments:
    """The classes of a label map."""

    classes: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class SeriesObjects:
    """Writes nothing else; `medfedaug.hospital.dicom.prediction_objects.DicomObjects` does for DICOM.

    ``further`` has the identities of the images' series after the first, by case and channel.
    """

    run: FinishedRun
    origin: Origin
    options: PredictionOptions
    folder: SiteFolder
    further: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def settings(self) -> dict[str, Any]:
        """Return the settings that determine the objects, for the record."""
        return {}

    def check(self, cases: Iterable[Case]) -> None:
        """Check that the objects of these cases can be written."""

    def files(self, case: Case, label: str) -> list[str]:
        """Return the files of a case, given that of its label map."""
        return []

    def segments(self, case: Case, classes: tuple[str, ...], notes: Mapping[str, str]) -> Segments:
        """Return the classes of a label map, with notes by class, for the format of the image."""
        return PlainSegments(classes)

    def write(self, out: Path, case: Case, label: Tensor, file: str, segments: Segments) -> None:
        """Write the objects of a case to a folder, given its label map, (1, X, Y, Z), and the map's file."""


def series_objects(
    run: FinishedRun,
    origin: Origin,
    options: PredictionOptions,
    folder: SiteFolder,
    further: Mapping[str, Mapping[str, str]],
) -> SeriesObjects:
    """Return what writes objects of series in this installation; see `SeriesObjects`."""
    asked = {"--rtstruct": options.rtstruct, "--report": options.report}
    for option in (option for option, value in asked.items() if value):
        added_module("dicom.prediction_objects", option)
    modules = added_modules("dicom.prediction_objects")
    make = modules[0].DicomObjects if modules else SeriesObjects
    objects: SeriesObjects = make(run, origin, options, folder, further)
    return objects
