"""`PredictionOptions`, settings of a prediction; `StudyOptions`, settings for the studies of an archive."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from medfedaug.config.options import File, Settings, setting, settings


@settings
class PredictionOptions(Settings):
    """Settings of a prediction."""

    PANEL: ClassVar[str] = "The prediction"

    site: str | None = setting(
        None,
        "The site of the federation that the images come from: its statistics and layers are used, where the "
        "run's methods have any. By default the images come from an unseen place, and are normalised with "
        "their own statistics.",
    )
    statistics: File | None = setting(
        None,
        "Statistics to normalise with, in place of the images' own: a JSON file of `medfedaug statistics` "
        "with one pair, or the statistics.json of an earlier prediction.",
    )
    series: str | None = setting(
        None,
        "DICOM series to predict, where a study has several: a SeriesInstanceUID, or a regular expression "
        "that is searched for in number, description, echo or phase, modality and UID of a series. The "
        "others are left out.",
    )
    device: str = setting("auto", "cpu, cuda, cuda:1, ..., or auto: CUDA if available.")
    probabilities: bool = setting(
        False, "Write the probabilities of the classes, too.", flags=("--probabilities",)
    )
    previews: bool = setting(True, "Write a picture of each case, or not.")
    codes: File | None = setting(
        None,
        "Codes of the classes for DICOM SEG, for example of SNOMED CT: a JSON file with category, type and, "
        "optionally, anatomic_region of each class "
        "(`medfedaug.hospital.dicom.segment_codes.read_segment_codes`). "
        "Without it, each class's name is its code.",
    )
    rtstruct: bool = setting(
        False, "Write an RTSTRUCT of each DICOM series, too: contours.", flags=("--rtstruct",)
    )
    report: bool = setting(
        False,
        "Write a DICOM structured report of each DICOM series, too: the volume of each class.",
        flags=("--report",),
    )
    flips: bool = setting(
        False,
        "Predict each image flipped, too (test-time augmentation): the agreement of all passes shows which "
        "cases are uncertain. The label map stays that of the unflipped image. In 2D four passes in place of "
        "one, in 3D eight.",
        flags=("--flips",),
    )
    uncertainty_map: bool = setting(
        False,
        "Write a NIfTI to the folder uncertainty for each image: the standard deviation of the probabilities "
        "over the passes, 0 to 0.5. Needs flips or several models.",
        flags=("--uncertainty-map",),
    )
    data: File | None = setting(
        None,
        "The site's data folder. Sizes are compared with its training label maps, which never leave the "
        "site.",
    )
    overwrite: bool = setting(
        False,
        "Delete the files of an earlier prediction in the folder, and start anew.",
        flags=("--overwrite",),
    )


@settings
class StudyOptions(Settings):
    """Settings of a prediction of studies in a DICOM archive."""

    PANEL: ClassVar[str] = "The archive"

    store: bool = setting(
        False,
        "Store DICOM SEG, contours and report in the archive, unless it already has this model's objects of "
        "the study.",
        flags=("--store",),
    )
    again: bool = setting(
        False, "Store further objects where the archive already has this model's.", flags=("--again",)
    )
    channels: Mapping[str, str] = setting(
        dict,
        "By name, the series of each channel of the image. The objects refer to the first series, and the "
        "others are resampled to its grid.",
        flags=None,
    )
    pseudonyms: File | None = setting(
        None,
        "Folder with the site's key of pseudonyms, such as data/site_A.state of an import: studies have "
        "the same names there and here, and patients who are withdrawn there are left out. By default the "
        "key of the site's data, or else OUT.state.",
    )
    parallel: int = setting(2, "Studies that are fetched at a time.", at_least=1, flags=None)
