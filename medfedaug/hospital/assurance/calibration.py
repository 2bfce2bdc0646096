"""``calibration.json``: thresholds of a site, their promises, and the images for which they hold."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from medfedaug.errors import ConfigError, config_errors, warn
from medfedaug.hospital.assurance.options import CLASSES, LESIONS, VOLUME
from medfedaug.runs.finished_run import FinishedRun, Origin
from medfedaug.runs.prediction.input_drift import DriftReference
from medfedaug.runs.prediction.predictions_file import Promise
from medfedaug.runs.recorded_run import RecordedRun
from medfedaug.utils.files import parse_versioned, sha256
from medfedaug.utils.printable import counted
from medfedaug.utils.structure import count, entries, list_of, map_of, number, one_of, optional, text

CALIBRATION = "calibration.json"  # name of the file in a run's folder, where `medfedaug predict` finds it
KIND, VERSION = "calibration", 1

_ROWS = list_of(list_of(number))
_STRUCTURE = entries(
    {"patients": count, "needed": count, "threshold": number, "reason": text}, needed=("patients", "needed")
)
_SITE = entries(
    {
        "origin": text,
        "statistics": optional(entries({"mean": list_of(number), "std": list_of(number)})),
        "ranges": entries({"over": text, "mean": _ROWS, "std": _ROWS, "edges": optional(_ROWS)}),
        "structures": map_of(_STRUCTURE),
    },
    needed=("origin", "statistics", "ranges", "structures"),
)
_MODEL = entries({"sha256": text, "run": text, "round": count}, needed=("sha256", "run", "round"))
_CONTENT = entries(
    {
        "model": _MODEL,
        "risk": one_of((VOLUME, LESIONS, CLASSES)),
        "miss": number,
        "confidence": optional(number),
        "date": text,
        "sites": map_of(_SITE),
    },
    needed=("model", "risk", "miss", "confidence", "date", "sites"),
)


def read_calibration(path: Path, run: RecordedRun) -> dict[str, Any]:
    """Read the file, and check that it is of the run's model."""
    with config_errors(f"{path}: not readable as a calibration", remedy="; run medfedaug calibrate"):
        content = parse_versioned(path.read_text(encoding="utf-8"), KIND, VERSION)
        _CONTENT(content, "")
    model = content["model"]
    if model["sha256"] != run.sha256:
        raise ConfigError(
            f"{path}: calibrated for another model (round {model['round']} of run {model['run']}, SHA-256 "
            f"{model['sha256'][:12]}…); calibrate this one with medfedaug calibrate, or remove the file"
        )
    return content


def sentences(content: Mapping[str, Any]) -> dict[str, str]:
    """Return all promises of a calibration, by site and structure."""
    return {
        f"{site}, {name}": sentence(content, site, name)
        for site, entry in content["sites"].items()
        for name, structure in entry["structures"].items()
        if "threshold" in structure
    }


def sentence(content: Mapping[str, Any], site: str, structure: str) -> str:
    """Return the promise of a structure at a site, in words."""
    share, risk = f"{100 * content['miss']:g}%", content["risk"]
    patients = counted(content["sites"][site]["structures"][structure]["patients"], "patient")
    like = f"patients like those of {site}"
    what = f"at most {share} of the {structure} missed in the mean of {like}"
    who = " who have it"
    if risk == LESIONS:
        what = f"at most {share} of the separate parts of the {structure} missed in the mean of {like}"
    elif risk == CLASSES:
        what, who = f"the true class is missing from the set for at most {share} of {like}", ""
    sure = f"with {100 * content['confidence']:g}% confidence, " if content["confidence"] else ""
    date, round_ = content["date"], content["model"]["round"]
    return f"{sure}{what} ({patients}{who}, calibrated on {date}, model of round {round_})"


def find_promise(run: FinishedRun, given: Path | None, origin: Origin) -> Promise | None:
    """Return the promise for images of a place, from a given file or that in the run's folder.

    Args:
        run: the run of the model.
        given: the file; ``None`` for `CALIBRATION` in the run's folder, if any.
        origin: where the images come from.

    Raises:
        ConfigError: for a calibration of another model; and for a given one without the place.
    """
    path = given or run.model.parent / CALIBRATION
    if given is None and not path.exists():
        return None
    content = read_calibration(path, run)
    places = [name for name, site in content["sites"].items() if site["origin"] == origin.site]
    if len(places) != 1:
        of = ", ".join(content["sites"])
        problem = f"{path}: calibrated for {of}, and the images come from {origin.site or 'an unknown place'}"
        hint = "--site NAME names their site" if not places else "calibrate each place into a file of its own"
        if given is not None:
            raise ConfigError(f"{problem}; {hint}")
        warn(f"no promise: {problem}; {hint}")
        return None
    (name,) = places
    site, ranges = content["sites"][name], content["sites"][name]["ranges"]
    promised = {key: entry for key, entry in site["structures"].items() if "threshold" in entry}
    return Promise(
        thresholds={key: entry["threshold"] for key, entry in promised.items()},
        sentences={key: sentence(content, name, key) for key in promised},
        notes=[
            f"no promise for {key}: {entry.get('reason', '')}"
            for key, entry in site["structures"].items()
            if key not in promised
        ],
        ranges=DriftReference(
            mean=torch.tensor(ranges["mean"], dtype=torch.float64),
            std=torch.tensor(ranges["std"], dtype=torch.float64),
            over=ranges["over"],
            edges=None if ranges["edges"] is None else np.array(ranges["edges"]),
            whose="the calibrated",
            farthest=0,
            largest_ratio=1,
        ),
        statistics=site["statistics"],
        sha256=sha256(path),
    )
