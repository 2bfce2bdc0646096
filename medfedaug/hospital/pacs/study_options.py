"""`StudyOptions`: settings of a prediction of studies in an archive."""

from collections.abc import Mapping
from typing import ClassVar

from medfedaug.config.options import Settings, setting, settings


@settings
class StudyOptions(Settings):
    """Settings of a prediction of studies in a DICOM archive."""

    PANEL: ClassVar[str] = "The archive"

    store: bool = setting(
        False,
        "Store DICOM SEG, contours and report in the archive. Studies that already have this model's objects "
        "are left out.",
        flags=("--store",),
    )
    channels: Mapping[str, str] = setting(
        dict,
        "By name, the series of each channel of the image. The objects refer to the first series, and the "
        "others are resampled to its grid.",
        flags=None,
    )
    volume: str | None = setting(
        None,
        "Volume of a series that holds several, such as 'b-value 800', 'echo time 80' or 'phase 2': a "
        "regular expression for what distinguishes them.",
        rare=True,
    )
    parallel: int = setting(2, "Studies that are fetched at a time.", at_least=1, rare=True)
