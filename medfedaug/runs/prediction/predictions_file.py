"""``predictions.json``: the model, its inputs and promises, and the outcome of each case."""

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from medfedaug.data.base import Case
from medfedaug.errors import ConfigError, config_errors
from medfedaug.runs.prediction.input_drift import DriftReference
from medfedaug.utils.files import check_version, parse_json, version_mark, write_json
from medfedaug.utils.printable import counted, printable
from medfedaug.utils.structure import (
    Check,
    both,
    count,
    entries,
    fail,
    finite,
    list_of,
    map_of,
    number,
    one_of,
    optional,
    text,
)

_FOLDER = "controlled"


@dataclass(frozen=True, eq=False)
class Promise:
    """Thresholds on probabilities, each with the sentence that holds for its maps or sets."""

    thresholds: Mapping[str, float]  # by structure, or a single one for sets of classes
    sentences: Mapping[str, str]  # by structure
    notes: Sequence[str]  # structures without a promise, with the reason
    ranges: DriftReference  # of the calibrated images; another image gets no promise
    # Mean and standard deviation that normalised the calibrated images, if any.
    statistics: Mapping[str, Any] | None
    sha256: str  # hash of the calibration

    def files(self, label: str, classes: Sequence[str]) -> dict[str, str]:
        """Return the file of each structure's controlled map, given the file of the label map."""
        numbers = {name: classes.index(name) for name in self.thresholds}
        plain = {name: re.sub(r"\W+", "_", name) for name in numbers}
        return {name: f"{_FOLDER}/{number}_{plain[name]}/{label}" for name, number in numbers.items()}

    def comment(self, maps: Mapping[str, Mapping[str, Any]]) -> str:
        """Describe the controlled maps of a case, from their entries in the record."""
        return "; ".join(
            f"controlled map of {name}, {entry.get('volume_ml', entry['voxels']):.4g} "
            f"{'ml' if 'volume_ml' in entry else 'voxels'}: {self.sentences[name]}"
            for name, entry in maps.items()
        )

    def differs(self, used: Mapping[str, Any] | None) -> bool:
        """Return whether a prediction normalises images with other statistics."""
        keys = ("mean", "std")
        return any((self.statistics or {}).get(key) != (used or {}).get(key) for key in keys)


PREDICTIONS = "predictions.json"
_KIND, _VERSION = "predictions", 1
# A call that predicts nothing keeps these of the last call that did.
_OF_ALL_CASES = ("notes", "compared_with_the_sites")
_SECONDS = 5.0  # between two writings: a file of thousands of cases takes as long as a case


class Predictions:
    """The record of a folder of predictions, which is written as it grows.

    ``inputs`` are model, statistics and options, which determine the result: with the same inputs, finished
    cases of an earlier call stay as they are. ``details`` may change.

    Attributes:
        cases: the finished cases, by name.
        failed: the failed cases, with ``error``.
        pending: the names and files of the remaining cases.
    """

    def __init__(self, out: Path, inputs: Mapping[str, Any], details: Mapping[str, Any]) -> None:
        self.out, self.inputs, self.details = out, dict(inputs), dict(details)
        self.cases: dict[str, dict[str, Any]] = {}
        self.failed: dict[str, dict[str, Any]] = {}
        self.pending: dict[str, list[str]] = {}
        self._written = 0.0
        self._earlier: Mapping[str, Any] = {}

    def __repr__(self) -> str:
        failed = f", {len(self.failed)} failed" if self.failed else ""
        return f"<predictions of {counted(len(self.cases), 'case')}{failed}: {printable(str(self.out))}>"

    @staticmethod
    def read(out: Path) -> dict[str, Any]:
        """Read the record of an earlier call from a folder; empty without one."""
        path = out / PREDICTIONS
        if not path.exists():
            return {}
        remedy = "; choose another folder, or move the file away"
        with config_errors(str(path), OSError, ValueError, remedy=remedy):
            content = check_version(parse_json(path.read_text(encoding="utf-8")), _KIND, _VERSION)
            _CONTENT(content, "")
            map_of(_result_check(content))(content["cases"], "cases")
            return content

    def resume(self, earlier: Mapping[str, Any], states: Mapping[str, Any]) -> None:
        """Take over the finished cases of an earlier call, from the result of `read`.

        ``states`` has the sizes and times of the files of each case of this call. A case with changed files
        is predicted again; cases that are not in this call stay as they are.
        """
        self._earlier = earlier
        self.details = {**{key: earlier[key] for key in _OF_ALL_CASES if key in earlier}, **self.details}
        for key, value in self.inputs.items():
            self.agree(key, value)
        if "statistics" in earlier:
            self.inputs["statistics"] = earlier["statistics"]
        for name, entry in earlier.get("cases", {}).items():
            written = [self.out / file for file in entry["written"]]
            if entry["state"] == states.get(name, entry["state"]) and all(path.exists() for path in written):
                self.cases[name] = entry

    def agree(self, key: str, value: Any) -> None:
        """Set an input; refuse it where finished cases of an earlier call had another one."""
        self.inputs[key] = value
        before = self._earlier.get(key)
        if self._earlier.get("cases") and before != value:
            name, was, now = _first_difference(key, before, value)
            raise ConfigError(
                f"{self.out} holds predictions with other {name} ({was}, and now {now}); choose another "
                "folder, or --overwrite"
            )

    def delete(self, files: Iterable[str]) -> None:
        """Delete files of an earlier call."""
        for file in files:
            (self.out / file).unlink(missing_ok=True)

    @staticmethod
    def files(earlier: Mapping[str, Any]) -> set[str]:
        """List the files of an earlier call, also the pending ones, relative to its folder."""
        listed = [entry["written"] for entry in earlier.get("cases", {}).values()]
        statistics = (earlier.get("statistics") or {}).get("file")
        listed += [[statistics]] if statistics else []
        return {file for files in (*listed, *earlier.get("pending", {}).values()) for file in files}

    def finished(self, name: str, entry: Mapping[str, Any]) -> None:
        """Add a predicted case."""
        self.cases[name] = dict(entry)
        self.pending.pop(name, None)
        self.failed.pop(name, None)
        self._write_soon()

    def failure(self, case: Case, error: str, files: Iterable[str]) -> None:
        """Add a failed case, and delete its files, which an earlier call made from another image."""
        self.delete(files)
        self.failed[case.name] = {"error": error}
        self.cases.pop(case.name, None)
        self.pending.pop(case.name, None)
        self._write_soon()

    def write(self) -> None:
        content = {
            **version_mark(_KIND, _VERSION),
            **self.inputs,
            **self.details,
            "look_first": look_first(self.cases),
            "cases": dict(sorted(self.cases.items())),
            "failed": dict(sorted(self.failed.items())),
            **({"pending": self.pending} if self.pending else {}),
        }
        write_json(self.out / PREDICTIONS, content)
        self._written = time.monotonic()

    def _write_soon(self) -> None:
        if time.monotonic() - self._written > _SECONDS:
            self.write()


def look_first(cases: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Sort cases by their least certain class; empty label maps come first.

    ``docs/results/look_first`` measures how many of the worst predictions the order finds.
    """
    lowest = {
        name: entry["probabilities"][entry["class"]]
        if "probabilities" in entry
        else min(entry["confidence"].values(), default=0.0)
        for name, entry in cases.items()
    }
    return sorted(lowest, key=lambda name: (lowest[name], name))


def _first_difference(key: str, before: Any, now: Any) -> tuple[str, str, str]:
    """Return the name of a setting, or of the first part that differs, and both values, shortened."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        part = next(k for k in {**before, **now} if before.get(k) != now.get(k))
        key, before, now = f"{key}: {part}", before.get(part), now.get(part)
    return key, str(before)[:60], str(now)[:60]


def _file(value: Any, where: str) -> None:
    """Accept a file below the folder; only such files may be deleted."""
    text(value, where)
    parts = PurePath(value).parts
    if not parts or PurePath(value).is_absolute() or ".." in parts or "\0" in value:
        fail(value, where, "a file below the folder")


def _result_check(content: Mapping[str, Any]) -> Check:
    classes = content["classes"]
    if content["task"] != "segmentation":
        shares = both(map_of(number), entries({}, needed=classes))
        of_image = {"class": one_of(classes), "probabilities": shares, "set": list_of(one_of(classes))}
        return entries(of_image, needed=("class", "probabilities"))
    results = {
        "voxels": both(map_of(count), entries({}, needed=classes)),
        "volume_ml": both(map_of(number), entries({}, needed=classes[1:])),
        "confidence": map_of(number),
        "controlled": map_of(entries({"file": text, "voxels": count, "volume_ml": number})),
    }
    return entries(results, needed=("voxels",))


_CASE = entries(
    {
        "files": list_of(text),
        "written": list_of(_file),
        "state": list_of(list_of(count)),
        "warnings": list_of(text),
        "remarks": list_of(text),
        "image": map_of(number),
        "no_promise": list_of(text),
    },
    finite,
    needed=("written", "state", "warnings"),
)
_STATISTICS = entries(
    {"of": text, "mean": list_of(number), "std": list_of(number), "intensity": text, "file": _file}
)


_CONTENT = entries(
    {
        "task": text,
        "classes": list_of(text),
        "cases": map_of(_CASE),
        "statistics": optional(_STATISTICS),
        "pending": map_of(list_of(_file)),
        "notes": list_of(text),
        "borrowed": map_of(text),
        "promises": map_of(text),
        "compared_with_the_sites": list_of(text),
        "failed": map_of(entries({"error": text}, needed=("error",))),
        "test": entries({"score": text, "warning": text}, needed=("score", "warning")),
    },
    needed=("task", "classes", "cases"),
)
