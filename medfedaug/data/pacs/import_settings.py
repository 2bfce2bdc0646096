"""`ImportSettings`: the choices of an import."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar

from medfedaug.config.options import Settings, setting, settings
from medfedaug.errors import ConfigError

BACKGROUND = "background"
"""Name of the class of voxels that no segment takes."""

LABELS = {"seg": "SEG", "rtstruct": "RTSTRUCT"}
"""Kinds of label objects, each with its modality."""

NEWEST = "newest"
"""The rule of label series that takes the newest of several outlines of one class."""

_CHANNEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_+-]*")


@settings
class ImportSettings(Settings):
    """Choices of an import."""

    PANEL: ClassVar[str] = "The choice"

    series: str | None = setting(
        None,
        "Series of the image: its UID, or a regular expression for number, description and modality.",
    )
    channels: Mapping[str, str] = setting(
        dict, "In place of a series, such a rule for each channel, by the channel's name.", flags=None
    )
    labels: str = setting("none", "Label maps: seg, rtstruct or none.", choices=(*LABELS, "none"))
    segments: Mapping[str, str] = setting(
        dict, "Patterns of segment names, each with its class; background is one, too.", flags=None
    )
    classes: tuple[str, ...] = setting(
        (BACKGROUND,),
        "The federation's classes in their order, background first, which number the voxels of label maps; "
        "by default, and with background alone, those of the segments in the order in which these name them.",
    )
    label_series: tuple[str, ...] = setting(
        (),
        "Rules of which a series of label objects has to fit one: a UID, or a regular expression; and "
        "newest, which takes the newest of several outlines of one class; without any, several are refused.",
    )
    automatic_labels: bool = setting(
        False,
        "Take predictions as label maps, too: SEG and RTSTRUCT of the algorithm type AUTOMATIC, and those of "
        "medfedaug.",
        flags=("--automatic-labels",),
    )
    unmapped: str = setting(
        "refuse",
        "Segments without a class: refuse, or background, which leaves their voxels to it.",
        choices=("refuse", BACKGROUND),
    )
    crossing: str = setting(
        "refuse",
        "Contours of one region that cross in a slice: refuse, or union, which takes what any encloses.",
        choices=("refuse", "union"),
    )
    threshold: float = setting(
        0.5,
        "Share of its maximum from which a voxel of a fractional SEG counts.",
        above=0,
        at_most=1,
    )
    overlap: str = setting(
        "refuse",
        "Segments of different classes that overlap: refuse, or priority, which gives the voxels to the "
        "class that the segments name first.",
        choices=("refuse", "priority"),
    )
    anonymise: bool = setting(
        False,
        "Keep the objects, too, without identity, in OUT/dicom: the basic profile of PS3.15; pixels stay.",
        flags=("--anonymise",),
    )
    allow_burned_in: bool = setting(
        False, "Take images that may hold text in their pixels.", flags=("--allow-burned-in",)
    )
    parallel: int = setting(2, "Series and studies at a time.", at_least=1)
    refresh: bool = setting(
        False,
        "Take studies again of which the archive has other images or label maps now; the version before is "
        "kept in the folder previous of --state.",
        flags=("--refresh",),
    )
    keep_versions: int | None = setting(
        None,
        "Earlier versions of a case that are kept, by this import and later ones; by default 1.",
        at_least=0,
    )

    def __post_init__(self) -> None:
        # Imported here: the options of the command are made without the readers of images.
        from medfedaug.data.io.dicom_series import compile_series

        compile_series(self.series)
        for name, rule in self.channels.items():
            if not _CHANNEL.fullmatch(name):
                raise ConfigError(f"--channel {name!r}: a name has letters, digits, _, + and - alone")
            compile_series(rule, "--channel")
        if self.series is not None and self.channels:
            raise ConfigError("give one of --series and --channel")
        for rule in self.label_series:
            compile_series(rule, "--label-series")
        object.__setattr__(self, "classes", self._classes())

    def _classes(self) -> tuple[str, ...]:
        named = [*dict.fromkeys(name for name in self.segments.values() if name != BACKGROUND)]
        if self.classes == (BACKGROUND,):
            return (BACKGROUND, *(named or ["foreground"]))
        if self.classes[:1] != (BACKGROUND,) or len({*self.classes}) != len(self.classes):
            raise ConfigError(
                f"--classes names each class of the federation once, {BACKGROUND} first: "
                f"--classes {BACKGROUND},tumour,edema"
            )
        for name in named:
            if name not in self.classes:
                raise ConfigError(
                    f"--segments gives the class {name!r}, and --classes has {', '.join(self.classes)}"
                )
        return self.classes

    @property
    def priority(self) -> list[str]:
        """Names of the classes in the order in which overlapping voxels are given to them."""
        return [*dict.fromkeys([*self.segments.values(), *self.classes[1:]])]

    @property
    def labelled(self) -> bool:
        """Return whether cases have label maps."""
        return self.labels != "none"
