"""`object_identity`: identity of the DICOM objects of a prediction, from the model and its inputs."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from medfedaug.data.base import Case, plain_name
from medfedaug.data.io.formats import is_dicom
from medfedaug.errors import ConfigError
from medfedaug.hospital.dicom.identity import ModelIdentity
from medfedaug.hospital.dicom.segment_codes import SegmentCodes, read_segment_codes
from medfedaug.hospital.dicom.series import open_series
from medfedaug.runs.finished_run import FinishedRun
from medfedaug.runs.input_statistics import Origin
from medfedaug.runs.prediction.ensemble import Ensemble


def read_codes(run: FinishedRun, path: str | Path | None) -> dict[str, SegmentCodes]:
    """Read the codes of a run's classes; empty without a file."""
    if path is None:
        return {}
    if run.config.task != "segmentation":
        raise ConfigError("--codes: the run classifies, and codes are for DICOM SEG; leave it out")
    return read_segment_codes(path, run.config.classes)


def channel_keys(names: Sequence[str], count: int) -> list[str]:
    """Return a key for each of several series: its channel's name where all have a name, else its number."""
    return [*map(plain_name, names)] if len(names) == count else [*map(str, range(count))]


def further_series(case: Case, names: Sequence[str]) -> dict[str, str]:
    """Return the SeriesInstanceUIDs of an image's DICOM series after the first, by `channel_keys`."""
    keyed = zip(channel_keys(names, len(case.files)), case.files, strict=True)
    return {key: open_series(file).uid for key, file in [*keyed][1:] if is_dicom(file)}


def object_identity(
    models: Ensemble,
    origin: Origin,
    codes: Mapping[str, SegmentCodes],
    again: str,
    *,
    further: Mapping[str, str] | None = None,
) -> ModelIdentity:
    """Return the identity of a case's objects, which depends on settings and further series.

    A site's pair follows from model and site, and a pair of the images themselves does not count. ``again``
    is that of `ModelIdentity`, and ``further`` has the SeriesInstanceUIDs of the image's series after the
    first, by channel.
    """
    chosen: dict[str, Any] = {}
    if codes:
        chosen["codes"] = {name: asdict(code) for name, code in codes.items()}
    if origin.pair is not None and not origin.site:
        chosen["statistics"] = [origin.pair.mean.tolist(), origin.pair.std.tolist()]
    if further:
        chosen["series"] = dict(further)
    text = json.dumps(chosen, sort_keys=True).encode()
    digest = hashlib.sha256(text).hexdigest() if chosen else ""
    tested = models.score(origin.site)
    return ModelIdentity(models.sha256, origin.site, again, digest, tested.score, tested.warning)
