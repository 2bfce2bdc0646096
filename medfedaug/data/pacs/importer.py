"""`import_studies`: studies of an archive as a site's data folder, under pseudonyms."""

from __future__ import annotations

import gzip
import re
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, Any

import nibabel
import numpy as np
import pydicom
import SimpleITK as sitk

from medfedaug.data.base import SPLITS, Case
from medfedaug.data.io.dicom_series import DicomSeries, compile_series, load_series, scan, select
from medfedaug.data.pacs.archive import STUDY_KEYS, Archive, FetchError, FoundSeries, FoundStudy, Wanted
from medfedaug.data.pacs.label_grid import LabelGrid, referenced_series
from medfedaug.data.splits import split_patients
from medfedaug.errors import ConfigError, ReaderError
from medfedaug.utils.files import (
    parse_json,
    parse_versioned,
    private_folder,
    write_atomic,
    write_json,
    write_versioned,
)

__all__ = ["ImportSettings", "Planned", "import_studies", "plan_import", "withdraw"]

_IMAGES = ("CT", "MR", "PT", "NM")
_BURNED_IN = ("US", "SC", "OT", "XC", "ES")
_LABELS = {"seg": "SEG", "rtstruct": "RTSTRUCT"}
_LOCALISER = re.compile(r"locali[sz]er|scout|survey|topogram", re.IGNORECASE)
_LIST, _KIND, _VERSION = "studies.json", "imported-studies", 1


@dataclass(frozen=True)
class ImportSettings:
    """Choices of an import.

    Args:
        series: UID of a series, or regular expression for number, description and modality.
        labels: ``seg``, ``rtstruct`` or ``none``.
        segments: patterns of segment names, each with its class.
        threshold: share of its maximum from which a voxel of a fractional SEG counts.
        allow_burned_in: whether images may hold text in their pixels.
        parallel: studies at a time.
    """

    series: str | None = None
    labels: str = "none"
    segments: Mapping[str, str] = field(default_factory=dict)
    threshold: float = 0.5
    allow_burned_in: bool = False
    parallel: int = 2

    def __post_init__(self) -> None:
        compile_series(self.series)
        if self.labels not in (*_LABELS, "none"):
            raise ConfigError(f"--labels {self.labels}: one of seg, rtstruct, none")
        if not 0 < self.threshold <= 1 or self.parallel < 1:
            raise ConfigError("--threshold is above 0 and at most 1, --parallel at least 1")

    @property
    def classes(self) -> list[str]:
        """Names of the classes, background first."""
        return ["background", *(dict.fromkeys(self.segments.values()) or ["foreground"])]


@dataclass
class Planned:
    """Series of a study, and what becomes of them.

    Args:
        case: pseudonym of the study.
        patient: pseudonym of the patient.
        study: as found; ``None`` where nothing was found.
        image: the chosen series.
        labels: series of label objects.
        rows: modality, number, objects, decision of each series.
        problem: why nothing is imported; empty where something is.
    """

    case: str
    patient: str
    study: FoundStudy | None = None
    image: FoundSeries | None = None
    labels: list[FoundSeries] = field(default_factory=list)
    rows: list[tuple[str, str, int | None, str]] = field(default_factory=list)
    problem: str = ""


def plan_import(
    archive: Archive,
    wanted: Sequence[Wanted],
    pseudonym: Callable[[str, str], str],
    settings: ImportSettings,
    on_event: Callable[[int, int], object] = lambda done, of: None,
) -> list[Planned]:
    """Find studies, and choose their series; nothing is fetched.

    Args:
        archive: the archive.
        wanted: the studies.
        pseudonym: of a name and its kind (``case``, ``patient``), with the site's key.
        settings: the choices.
        on_event: called with the number of values that were looked for, and of all.

    Raises:
        ArchiveError: where the archive does not answer or refuses.
    """
    found: dict[str, Planned] = {}
    for done, one in enumerate(wanted):
        studies = archive.find_studies(one)
        if not studies:
            case = pseudonym(one.value, "case")
            found[case] = Planned(case, "", problem="the archive has no such study")
        for study in studies:
            found[study.uid] = _planned(archive, study, pseudonym, settings)
        on_event(done + 1, len(wanted))
    return [*found.values()]


def _planned(
    archive: Archive, study: FoundStudy, pseudonym: Callable[[str, str], str], settings: ImportSettings
) -> Planned:
    person = f"{study.issuer}\\{study.patient}" if study.patient else study.uid
    plan = Planned(pseudonym(study.uid, "case"), pseudonym(person, "patient"), study)
    pattern = compile_series(settings.series)
    images: list[FoundSeries] = []
    for one in archive.find_series(study):
        searched = f"{one.number} {one.description} {one.modality}"
        if one.modality == _LABELS.get(settings.labels):
            plan.labels.append(one)
            decision = "label map"
        elif one.modality in _BURNED_IN and not settings.allow_burned_in:
            decision = "left out: may hold text in its pixels; --allow-burned-in takes it"
        elif pattern is not None and one.uid != settings.series and not pattern.search(searched):
            decision = "left out: not what --series names"
        elif pattern is None and one.modality not in _IMAGES:
            decision = "left out: no image, or none of CT, MR, PT, NM"
        elif pattern is None and _LOCALISER.search(one.description):
            decision = "left out: a localiser"
        else:
            images.append(one)
            decision = "image"
        plan.rows.append((one.modality, one.number, one.instances, decision))
    if len(images) != 1:
        what = "no series is" if not images else f"{len(images)} series are"
        plan.problem = f"{what} a possible image, one was expected; choose with --series"
    elif settings.labels != "none" and not plan.labels:
        plan.problem = f"it has no {_LABELS[settings.labels]}"
    plan.image = images[0] if len(images) == 1 else None
    return plan


def import_studies(
    archive: Archive,
    plans: Sequence[Planned],
    out: Path,
    state: Path,
    settings: ImportSettings,
    on_case: Callable[[str, str], object] = lambda case, problem: None,
) -> dict[str, str]:
    """Fetch and convert the studies of a plan; those that are there already are kept.

    Args:
        archive: the archive.
        plans: of `plan_import`.
        out: the site's data folder.
        state: folder of the site's own list.
        settings: the choices.
        on_case: called with each finished case, and its problem.

    Returns:
        Problems by case.

    Raises:
        ArchiveError: where the archive does not answer any more; what is imported stays.
    """
    book = _Book(state, settings)
    for plan in plans:
        if plan.patient in book.withdrawn:
            plan.problem = "the patient was withdrawn"
    todo = [plan for plan in plans if not plan.problem and not book.has(plan.case, out)]
    failed = {plan.case: plan.problem for plan in plans if plan.problem}

    def one(plan: Planned) -> None:
        staging = out / ".fetching" / plan.case
        try:
            _import(archive, plan, out, staging, settings)
        except (FetchError, ReaderError) as error:
            failed[plan.case] = str(error)
        else:
            book.enter(plan)
            failed.pop(plan.case, None)
            shutil.rmtree(staging, ignore_errors=True)
        on_case(plan.case, failed.get(plan.case, ""))

    with ThreadPoolExecutor(settings.parallel) as pool:
        futures = [pool.submit(one, plan) for plan in todo]
        try:
            for future in futures:
                future.result()
        finally:
            pool.shutdown(cancel_futures=True)
    # Not after an interruption: a split of some patients would bind the others.
    _write_listing(out, book, settings.classes, labelled=settings.labels != "none")
    return failed


def withdraw(wanted: Sequence[Wanted], out: Path, state: Path) -> dict[str, int]:
    """Remove the patients whose studies are named: images, label maps, entries; and record it.

    A later import leaves them out. The record has pseudonyms and dates alone.

    Args:
        wanted: values of the patients' studies.
        out: the site's data folder.
        state: folder of the site's own list.

    Returns:
        Number of removed cases by the patient's pseudonym.

    Raises:
        ConfigError: where there is no list.
    """
    if not (state / _LIST).is_file():
        raise ConfigError(f"{state}: holds no list of imported studies; name its folder with --state")
    book = _Book(state)
    values = {(one.key, one.value) for one in wanted}
    patients = {
        entry["patient"]
        for entry in book.studies.values()
        if any((key, entry.get(key)) in values for key in STUDY_KEYS)
    }
    removed: dict[str, int] = dict.fromkeys(sorted(patients), 0)
    for case, entry in [*book.studies.items()]:
        if entry["patient"] in patients:
            for kind in ("images", "labels"):
                (out / kind / f"{case}.nii.gz").unlink(missing_ok=True)
            shutil.rmtree(out / ".fetching" / case, ignore_errors=True)
            del book.studies[case]
            removed[entry["patient"]] += 1
    listing = out / "dataset.json"
    if removed and listing.is_file():
        content = parse_json(listing.read_text(encoding="utf-8"))
        for part in SPLITS:
            rows = content.get(part, [])
            content[part] = [row for row in rows if row.get("patient") not in patients]
        write_json(listing, content)
    today = datetime.now(timezone.utc).isoformat(timespec="seconds")
    book.withdrawn.update(dict.fromkeys(removed, today))
    book.save()
    return removed


def _import(archive: Archive, plan: Planned, out: Path, staging: Path, settings: ImportSettings) -> None:
    if plan.image is None:
        raise ReaderError("it has no image")
    private_folder(staging)
    files = archive.fetch(plan.image, staging / "image")
    if not settings.allow_burned_in:
        _check_burned_in(files)
    series = _one_volume(staging / "image", settings.series)
    grid = None
    if settings.labels != "none":
        grid = LabelGrid(series, settings.segments, settings.classes)
        for number, found in enumerate(plan.labels):
            for file in archive.fetch(found, staging / f"label{number}"):
                _add(grid, file, series.uid, settings.threshold)
        if not grid.used:
            raise ReaderError("no segment of the names that --segments gives refers to its image")
    try:
        image = load_series(series)
    except (RuntimeError, ValueError) as error:
        raise ReaderError("its voxels cannot be decoded") from error
    voxels = sitk.GetArrayFromImage(image).T
    whole = np.isfinite(voxels).all() and (voxels == np.rint(voxels)).all() and np.abs(voxels).max() < 2**15
    affine = series.affine if series.affine is not None else np.eye(4)
    if grid is not None:
        _save(out / "labels" / f"{plan.case}.nii.gz", grid.voxels, affine)
    _save(out / "images" / f"{plan.case}.nii.gz", voxels.astype(np.int16) if whole else voxels, affine)


def _add(grid: LabelGrid, file: Path, series: str, threshold: float) -> None:
    try:
        dataset = pydicom.dcmread(file)
        if series in referenced_series(dataset):
            grid.add(dataset, threshold)
    except ReaderError:
        raise
    except Exception as error:  # a damaged object fails anywhere in pydicom
        raise ReaderError("a label object is damaged") from error


def _check_burned_in(files: Sequence[Path]) -> None:
    for file in files:
        header = pydicom.dcmread(
            file, stop_before_pixels=True, force=True, specific_tags=["BurnedInAnnotation"]
        )
        if str(header.get("BurnedInAnnotation", "")).upper() == "YES":
            raise ReaderError("its pixels hold text (BurnedInAnnotation); --allow-burned-in takes it")


def _one_volume(folder: Path, pattern: str | None) -> DicomSeries:
    found = scan(folder)
    chosen = [*found.series] if len(found.series) == 1 else select(found.series, pattern).chosen
    if len(chosen) != 1:
        raise ReaderError(f"the series holds {len(found.series)} volumes, one was expected")
    series = chosen[0]
    if series.problem:
        raise ReaderError(series.problem.partition("; look at")[0])
    if series.affine is None:
        raise ReaderError("its slices do not say where they lie")
    if series.is_sheared:
        raise ReaderError("its slices are sheared (a tilted gantry)")
    return series


def _save(path: Path, voxels: np.ndarray, affine: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = nibabel.Nifti1Image(voxels, affine)
    image.header.set_xyzt_units("mm")

    def write(file: IO[bytes]) -> None:
        with gzip.GzipFile(fileobj=file, mode="wb", compresslevel=1) as packed:
            image.to_stream(packed)

    write_atomic(path, write)


class _Book:
    """The site's own list: which pseudonym is which study. Its file may be read by its owner alone."""

    def __init__(self, state: Path, settings: ImportSettings | None = None) -> None:
        self.path = state / _LIST
        self._lock = threading.Lock()
        self._content: dict[str, Any] = {"settings": None, "studies": {}, "withdrawn": {}}
        if self.path.exists():
            try:
                self._content = parse_versioned(self.path.read_text(encoding="utf-8"), _KIND, _VERSION)
            except ValueError as error:
                raise ConfigError(f"{self.path}: not readable; restore it from a copy") from error
        self.studies: dict[str, Any] = self._content["studies"]
        self.withdrawn: dict[str, str] = self._content["withdrawn"]
        if settings is None:
            return
        choices: dict[str, Any] = {
            "series": settings.series,
            "labels": settings.labels,
            "segments": dict(settings.segments),
            "threshold": settings.threshold,
        }
        if self._content["settings"] not in (None, choices):
            raise ConfigError(
                f"{self.path.parent}: its studies were imported with other settings; "
                "give the same ones, or another --out"
            )
        self._content["settings"] = choices

    def has(self, case: str, out: Path) -> bool:
        return case in self.studies and (out / "images" / f"{case}.nii.gz").is_file()

    def enter(self, plan: Planned) -> None:
        if plan.study is None or plan.image is None:
            return
        entry = {
            "patient": plan.patient,
            "PatientID": plan.study.patient,
            "AccessionNumber": plan.study.accession,
            "StudyInstanceUID": plan.study.uid,
            "SeriesInstanceUID": plan.image.uid,
        }
        with self._lock:
            self.studies[plan.case] = entry
            self.save()

    def save(self) -> None:
        content = {key: self._content[key] for key in ("settings", "studies", "withdrawn")}
        write_versioned(self.path, _KIND, _VERSION, content, private=True)


def _write_listing(out: Path, book: _Book, classes: Sequence[str], *, labelled: bool) -> None:
    """Write ``dataset.json``: by patient into training, validation and test, or all as images to predict.

    A patient stays in the split of an earlier list.
    """
    cases = [
        Case(case, out / "images" / f"{case}.nii.gz", "", patient=entry["patient"])
        for case, entry in sorted(book.studies.items())
        if book.has(case, out)
    ]
    if not cases:
        return
    known = _known_splits(out / "dataset.json") if labelled else {}
    new = [case for case in cases if case.patient not in known]
    split: Mapping[str, Sequence[Case]]
    if known and len({case.patient for case in new}) < len(SPLITS):
        split = {"training": new}
    else:
        split = split_patients(out.resolve().name, new) if labelled else {"test": new}
    known |= {case.patient: part for part, some in split.items() for case in some}
    content: dict[str, Any] = {"labels": {str(number): name for number, name in enumerate(classes)}}
    for part in SPLITS:
        content[part] = [
            {
                "image": f"images/{case.name}.nii.gz",
                **({"label": f"labels/{case.name}.nii.gz"} if labelled else {}),
                "patient": case.patient,
            }
            for case in cases
            if known[case.patient] == part
        ]
    write_json(out / "dataset.json", content)


def _known_splits(listing: Path) -> dict[str, str]:
    """The split of each patient of an earlier list; empty where that list had too few to train."""
    if not listing.is_file():
        return {}
    content = parse_json(listing.read_text(encoding="utf-8"))
    found = {row["patient"]: part for part in SPLITS for row in content.get(part, ())}
    return found if "training" in found.values() else {}
