"""`PredictionOptions`: settings of a prediction."""

from typing import ClassVar

from medfedaug.config.options import File, Settings, setting, settings


@settings
class PredictionOptions(Settings):
    """Settings of a prediction."""

    PANEL: ClassVar[str] = "The prediction"

    site: str | None = setting(
        None,
        "Site of the federation that the images come from. Its statistics and layers are used where the "
        "run's methods have any. By default the images come from an unseen place, and are normalised with "
        "their own statistics.",
    )
    statistics: File | None = setting(
        None,
        "Statistics to normalise with, instead of the images' own. A JSON file of `medfedaug statistics` "
        "with one pair, or the statistics.json of an earlier prediction.",
    )
    series: str | None = setting(
        None,
        "DICOM series to predict where a study has several: its UID or a regular expression. The expression "
        "is searched for in number, description, echo or phase, modality and UID of a series. The other "
        "series are left out.",
    )
    device: str = setting("auto", "cpu, cuda, cuda:1, ..., or auto: CUDA if available.")
    probabilities: bool = setting(
        False, "Write the probabilities of the classes, too.", flags=("--probabilities",), rare=True
    )
    previews: bool = setting(True, "Write a picture of each case, or not.", rare=True)
    rtstruct: bool = setting(
        False, "Write an RTSTRUCT of each DICOM series, too: contours.", flags=("--rtstruct",)
    )
    report: bool = setting(
        False, "Write a DICOM structured report of volumes for each series, too.", flags=("--report",)
    )
    overwrite: bool = setting(
        False, "Delete the files of an earlier prediction, and start anew.", flags=("--overwrite",)
    )
