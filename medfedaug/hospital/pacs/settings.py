"""`ImportSettings`: the choices of an import; `StudyOptions`: those of a prediction of studies."""

import re
from collections.abc import Mapping
from typing import ClassVar

from medfedaug.config.options import Settings, setting, settings
from medfedaug.errors import ConfigError
from medfedaug.utils.validation import check_choice

BACKGROUND = "background"  # class of voxels without a segment
LABELS = {"seg": "SEG", "rtstruct": "RTSTRUCT"}  # modalities of label objects, by kind
NEWEST = "newest"  # rule of label series that takes the newest of several outlines of one class
_CHANNEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_+-]*")


@settings
class ImportSettings(Settings):
    """Choices of an import."""

    PANEL: ClassVar[str] = "The choice"

    series: str | None = setting(
        None, "Series of the image: its UID, or a regular expression for number, description and modality."
    )
    volume: str | None = setting(
        None,
        "Volume of a series that holds several, such as 'b-value 800', 'echo time 80' or 'phase 2': a "
        "regular expression for what distinguishes them.",
        rare=True,
    )
    channels: Mapping[str, str] = setting(
        dict, "Rules like that of the series for channels, by the channel's name.", flags=None
    )
    labels: str = setting("none", "Label maps: seg, rtstruct or none.", choices=(*LABELS, "none"))
    segments: Mapping[str, str] = setting(
        dict, "Patterns of segment names, each with its class; background is one, too.", flags=None
    )
    classes: tuple[str, ...] = setting(
        (BACKGROUND,),
        "The federation's classes, background first, in the order that numbers the voxels of label maps; by "
        "default, or with only background, the classes of the segments in their order.",
    )
    label_series: tuple[str, ...] = setting(
        (),
        "Rules for series of label objects, which must match one: a UID, a regular expression, or newest. "
        "newest takes the newest of several outlines of one class instead of refusing them.",
        rare=True,
    )
    automatic_labels: bool = setting(
        False,
        "Also take predictions as label maps: SEG and RTSTRUCT of the algorithm type AUTOMATIC, and objects "
        "of medfedaug.",
        flags=("--automatic-labels",),
        rare=True,
    )
    labelled: tuple[str, ...] = setting(
        (),
        "Classes that the site has outlined wherever they are, separated by commas; by default those that "
        "some label map shows.",
    )
    overlap: str = setting(
        "refuse",
        "Segments of different classes that overlap: refuse, or priority, which gives the voxels to the "
        "class that the segments name first.",
        choices=("refuse", "priority"),
        rare=True,
    )
    anonymise: bool = setting(
        False,
        "Also keep the objects without identity in OUT/dicom, by the basic profile of PS3.15; pixels stay.",
        flags=("--anonymise",),
    )
    allow_burned_in: bool = setting(
        False, "Take images that may hold text in their pixels.", flags=("--allow-burned-in",), rare=True
    )
    parallel: int = setting(2, "Series and studies at a time.", at_least=1, rare=True)
    refresh: bool = setting(
        False,
        "Import the studies again, also those that are there: an outline was corrected.",
        flags=("--refresh",),
    )

    def __post_init__(self) -> None:
        # A local import: the command makes its options without the readers of images.
        from medfedaug.hospital.dicom.series import compile_series

        compile_series(self.series)
        compile_series(self.volume, "--volume")
        for name, rule in self.channels.items():
            if not _CHANNEL.fullmatch(name):
                raise ConfigError(f"--channel {name!r}: a name has only letters, digits, _, + and -")
            compile_series(rule, "--channel")
        if self.series is not None and self.channels:
            raise ConfigError("give either --series or --channel")
        for rule in self.label_series:
            compile_series(rule, "--label-series")
        object.__setattr__(self, "classes", self._classes())
        names = tuple(name.strip() for text in self.labelled for name in text.split(","))
        object.__setattr__(self, "labelled", names)
        if self.labelled and not self.outlined:
            raise ConfigError("--labelled goes with --labels seg or --labels rtstruct")
        for name in self.labelled:
            check_choice("--labelled", name, self.classes[1:])

    def _classes(self) -> tuple[str, ...]:
        names = [*dict.fromkeys(name for name in self.segments.values() if name != BACKGROUND)]
        if self.classes == (BACKGROUND,):
            return (BACKGROUND, *(names or ["foreground"]))
        if self.classes[:1] != (BACKGROUND,) or len({*self.classes}) != len(self.classes):
            raise ConfigError(
                f"--classes names each class of the federation once, {BACKGROUND} first: "
                f"--classes {BACKGROUND},tumour,edema"
            )
        for name in names:
            if name not in self.classes:
                raise ConfigError(
                    f"--segments gives the class {name!r}, and --classes has {', '.join(self.classes)}"
                )
        return self.classes

    @property
    def priority(self) -> list[str]:
        """Classes in the order in which they take overlapping voxels."""
        return [*dict.fromkeys([*self.segments.values(), *self.classes[1:]])]

    @property
    def outlined(self) -> bool:
        """Return whether cases have label maps."""
        return self.labels != "none"


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
