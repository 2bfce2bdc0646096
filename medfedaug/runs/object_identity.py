"""`object_identity`: identity of the DICOM objects of a prediction: model, site, codes, statistics."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from medfedaug.data.io.dicom_identity import ModelIdentity
from medfedaug.data.io.segment_codes import SegmentCodes, read_segment_codes
from medfedaug.errors import ConfigError
from medfedaug.runs.ensemble import Ensemble
from medfedaug.runs.finished_run import FinishedRun
from medfedaug.runs.input_statistics import Origin

__all__ = ["object_identity", "read_codes"]


def read_codes(run: FinishedRun, path: str | Path | None) -> dict[str, SegmentCodes]:
    """Read the codes of a run's classes; none without a file.

    Raises:
        ConfigError: for a run that classifies, and as `read_segment_codes`.
    """
    if path is None:
        return {}
    if run.config.task != "segmentation":
        raise ConfigError("--codes: the run classifies, and codes are for DICOM SEG; leave it out")
    return read_segment_codes(path, run.config.classes)


def object_identity(
    models: Ensemble, origin: Origin, codes: Mapping[str, SegmentCodes], again: str
) -> ModelIdentity:
    """Return the identity of objects; with other codes, or another file of statistics, it is another one.

    Args:
        models: one run, or several.
        origin: of the images. The pair of a site follows from model and site, and that of the images given
            does not count.
        codes: of the classes.
        again: of `ModelIdentity`.
    """
    chosen: dict[str, Any] = {}
    if codes:
        chosen["codes"] = {name: asdict(code) for name, code in codes.items()}
    if origin.pair is not None and not origin.site:
        chosen["statistics"] = [origin.pair.mean.tolist(), origin.pair.std.tolist()]
    text = json.dumps(chosen, sort_keys=True).encode()
    return ModelIdentity(
        models.sha256, origin.site, again, hashlib.sha256(text).hexdigest() if chosen else ""
    )
