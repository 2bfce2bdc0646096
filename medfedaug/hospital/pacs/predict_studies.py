"""`predict_studies`: predict studies of an archive, and store the objects with their images."""

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import pydicom

from medfedaug.config.run import RunConfig
from medfedaug.data.base import plain_name
from medfedaug.errors import ConfigError, ReaderError
from medfedaug.hospital.dicom.checks import require
from medfedaug.hospital.dicom.identity import ModelIdentity, ObjectKind
from medfedaug.hospital.dicom.prediction_objects import (
    channel_keys,
    object_files,
    object_identity,
    object_kinds,
)
from medfedaug.hospital.dicom.series import scan
from medfedaug.hospital.pacs.archive import Archive, ArchiveError, ArchiveSeries, Patience, StudyQuery
from medfedaug.hospital.pacs.choice import StudyPlan, plan_import
from medfedaug.hospital.pacs.import_folder import read_list
from medfedaug.hospital.pacs.object_check import reading_objects
from medfedaug.hospital.pacs.settings import ImportSettings, StudyOptions
from medfedaug.hospital.pacs.volume import choose_volume, load_on_grid, open_volume, write_nifti
from medfedaug.hospital.privacy.pseudonyms import Pseudonyms
from medfedaug.runs.finished_run import FinishedRun, Origin
from medfedaug.runs.folder import only_process
from medfedaug.runs.prediction.options import PredictionOptions
from medfedaug.runs.prediction.predict import Event, predict_images, uses_given_images
from medfedaug.runs.prediction.predictions_file import Predictions, Promise
from medfedaug.utils.files import private_folder, write_json, write_versioned

_LIST, _KIND, _VERSION = "studies.json", "predicted-studies", 1
_IMAGES, _FETCHING = "images", "fetching"
_COLOURS = 3
_MOST_FAILURES = 3  # consecutive refusals of an archive after which nothing more is sent


@dataclass
class StudyPredictions:
    """Outcome of `predict_studies`, by the pseudonym of each study.

    ``cases`` are entries of ``predictions.json``. ``stored`` and ``existing`` have the kinds of objects that
    this call stored and that the archive already had. ``problems`` has the reasons why a study has no
    prediction, or an object was not stored.
    """

    cases: dict[str, Any] = field(default_factory=dict)
    stored: dict[str, list[str]] = field(default_factory=dict)
    existing: dict[str, list[str]] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)


def predict_studies(
    run: FinishedRun,
    archive: Archive,
    wanted: Sequence[StudyQuery],
    out: Path,
    options: PredictionOptions,
    studies: StudyOptions,
    *,
    on_event: Event | None = None,
    promise: Promise | None = None,
) -> StudyPredictions:
    """Fetch studies, predict them, and store the predictions with their images.

    A study is skipped if the archive already has all objects of this model. A study that cannot be fetched,
    predicted or stored does not stop the others. A second call continues an interrupted one. Images lie in
    ``OUT.state`` until all are predicted. An archive that does not answer, or refuses several objects one
    after another, ends the call; stored objects stay.
    """
    _check_options(run.config, studies)
    tell = on_event or (lambda event: None)
    origin = Origin.of(run, options.site, options.statistics)
    state = out.with_name(f"{out.name}.state")
    private_folder(state)
    with only_process(state):
        settings = ImportSettings(
            series=options.series,
            volume=studies.volume,
            channels=studies.channels,
            allow_burned_in=True,
            parallel=studies.parallel,
        )
        plans = plan_import(archive, wanted, Pseudonyms.of_site(state).of, settings, tell)
        job = _Job(
            archive=archive,
            out=out,
            state=state,
            studies=studies,
            series=options.series,
            identity=partial(object_identity, run, origin, calibration=promise.sha256 if promise else ""),
            kinds=(ObjectKind.SEGMENTATION, *object_kinds(options)),
            named=bool(run.config.channel_names),
            book=_Book(state / _LIST),
        )
        todo = job.open_studies(plans, fresh=options.overwrite)
        if fetched := job.fetch(todo, tell):
            predictions = predict_images(
                run,
                state / _IMAGES,
                out,
                replace(options, series=None),
                further={case: job.further(case) for case in fetched},
                on_event=tell,
                on_case=job.deliver,
                promise=promise,
            )
            failed = predictions.failed
            job.result.problems |= {case: failed[case]["error"] for case in fetched if case in failed}
        job.finish(together=uses_given_images(run, origin))
        return job.result


def _check_options(config: RunConfig, studies: StudyOptions) -> None:
    """Check that an archive can have images of a run, with the series of its channels."""
    if config.task != "segmentation":
        raise ConfigError(
            "the run classifies photographs, which no archive of DICOM studies has; give --images"
        )
    channels, names, count = studies.channels, config.channel_names, config.in_channels
    if not channels:
        if (names and count > 1) or count not in (1, _COLOURS):
            flags = " ".join(f"--channel '{name}=REGEX'" for name in names or ("A", "B"))
            raise ConfigError(f"the model takes {count} channels; name the series of each: {flags}")
    elif names:  # the model may do without some
        known = {plain_name(name) for name in names}
        if unknown := [name for name in channels if plain_name(name) not in known]:
            raise ConfigError(f"--channel {unknown[0]}: the model's channels are {', '.join(names)}")
    elif len(channels) != count:
        raise ConfigError(f"--channel names {len(channels)} channels; the model expects {count}")


@dataclass
class _Job:
    """One call: the objects to store of each study, and the outcome."""

    archive: Archive
    out: Path
    state: Path
    studies: StudyOptions
    series: str | None
    identity: Callable[..., ModelIdentity]
    kinds: Sequence[ObjectKind]
    named: bool
    book: "_Book"
    patience: Patience = field(default_factory=lambda: Patience(answered=True))
    images: dict[str, list[ArchiveSeries]] = field(default_factory=dict)
    missing: dict[str, list[ObjectKind]] = field(default_factory=dict)
    failures: int = 0
    result: StudyPredictions = field(default_factory=StudyPredictions)

    def open_studies(self, plans: Sequence[StudyPlan], *, fresh: bool) -> list[str]:
        """Ask the archive for existing objects, and return the cases to fetch."""
        earlier = {} if fresh else Predictions.read(self.out).get("cases", {})
        todo = []
        for plan in plans:
            if plan.problem:
                self.result.problems[plan.case] = plan.problem
                continue
            self.images[plan.case] = plan.images
            if self.studies.store and not self._ask(plan):
                continue
            if not self.book.enter(plan, self.studies.volume):
                for part in (_IMAGES, _FETCHING):  # an interrupted call chose another image
                    shutil.rmtree(self.state / part / plan.case, ignore_errors=True)
            done = self.studies.store and not self.missing[plan.case]
            # An interrupted call's finished cases, too: statistics may be of all images.
            kept = (self.state / _IMAGES / plan.case).is_dir()
            if kept or not (done or self._is_whole(plan.case, earlier)):
                todo.append(plan.case)
        return todo

    def _ask(self, plan: StudyPlan) -> bool:
        """Ask the archive for objects of this model; return whether it answers."""
        assert plan.study is not None
        try:
            uids = {series.uid for series in self.archive.find_series(plan.study)}
            self.patience.heard()
        except ArchiveError as error:
            self.result.problems[plan.case] = self.patience.problem(error)
            return False
        existing = [kind for kind in self.kinds if self._series_uid(plan.case, kind) in uids]
        self.missing[plan.case] = [kind for kind in self.kinds if kind not in existing]
        if existing:
            self.result.existing[plan.case] = [kind.word for kind in existing]
        return True

    def fetch(self, todo: Sequence[str], tell: Event) -> list[str]:
        for path in [path for part in (_IMAGES, _FETCHING) for path in (self.state / part).glob("*")]:
            if path.name not in todo:  # of other cases, or a list of them
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        fetched = []
        with ThreadPoolExecutor(self.studies.parallel) as pool:
            came = zip(todo, pool.map(self._fetched, todo), strict=True)
            for number, (case, is_there) in enumerate(came, start=1):
                fetched += [case] if is_there else []
                tell({"event": "fetched", "number": number, "of": len(todo)})
        if fetched and self.studies.channels:
            self._list_channels(fetched)
        return fetched

    def _fetched(self, case: str) -> bool:
        """Fetch a case, or record the reason why it cannot be fetched."""
        try:
            with reading_objects():
                self._fetch(case)
        except ReaderError as error:
            self.result.problems[case] = str(error)
            shutil.rmtree(self.state / _FETCHING / case)
        except ArchiveError as error:
            # Its fetched objects stay, and the next call asks for the missing ones alone.
            self.result.problems[case] = self.patience.problem(error)
        else:
            return True
        return False

    def _fetch(self, case: str) -> None:
        place, folder = self.state / _IMAGES / case, self.state / _FETCHING / case
        if place.is_dir():  # whole, of an earlier call
            return
        private_folder(folder)
        private_folder(place.parent)
        for number, series in enumerate(self.images[case]):
            self.archive.fetch(series, folder / _part(case, number) if self.studies.channels else folder)
        self.patience.heard()
        if self.studies.channels:
            self._join_channels(case, folder)
        else:
            self._keep_volume(folder, self.series)
        os.replace(folder, place)

    def _keep_volume(self, folder: Path, rule: str | None) -> None:
        """Remove the files of the other volumes of a fetched series."""
        volumes = scan(folder).series
        chosen = choose_volume(volumes, rule, self.studies.volume)
        others = {file for one in volumes if one is not chosen for file in one.files}
        require(others.isdisjoint(chosen.files), "its volumes share a file; `medfedaug import` can read one")
        for file in others:
            file.unlink()

    def _join_channels(self, case: str, folder: Path) -> None:
        """Resample the other channels to the grid of the first one, as NIfTI next to its series."""
        channels = self.studies.channels
        parts = [folder / _part(case, number) for number in range(len(channels))]
        volumes = [
            open_volume(part, rule, allow_burned_in=True, volume=self.studies.volume)
            for part, rule in zip(parts, channels.values(), strict=True)
        ]
        grid = volumes[0]
        for part, voxels in zip(parts[1:], load_on_grid(volumes, grid)[1:], strict=True):
            write_nifti(part.with_name(f"{part.name}.nii.gz"), voxels, grid.stated_affine)
        for part in parts[1:]:
            shutil.rmtree(part)
        self._keep_volume(parts[0], next(iter(channels.values())))

    def _list_channels(self, cases: Sequence[str]) -> None:
        """Write the list of the cases' channels, as `predict_images` reads it."""
        others = [f"{_part('', n)}.nii.gz" for n in range(1, len(self.studies.channels))]
        rows = [{"image": [f"{name}/{file}" for file in (_part(name, 0), *others)]} for name in cases]
        names = {str(n): name for n, name in enumerate(self.studies.channels)} if self.named else {}
        content = {**({"channel_names": names} if names else {}), "test": rows}
        write_json(self.state / _IMAGES / "dataset.json", content)

    def deliver(self, case: str) -> None:
        """Store the objects of a predicted case that the archive lacks."""
        if not self.missing.get(case):
            return
        files = object_files(self.out, case)
        try:
            for kind in [*self.missing[case]]:
                dataset = pydicom.dcmread(files[kind])
                self.archive.store(dataset)
                self.missing[case].remove(kind)
                self.result.stored.setdefault(case, []).append(kind.word)
                self.book.stored(case, kind, dataset)
        except ArchiveError as error:
            self.failures += 1
            if self.failures == _MOST_FAILURES:
                raise ArchiveError(f"{error}; run the same command again to continue") from error
            self.result.problems[case] = str(error)
        else:
            self.failures = 0

    def finish(self, *, together: bool) -> None:
        """Store the predictions of an earlier call, and remove the images.

        Where predictions depend on all images ``together``, these stay until no study fails.
        """
        cases = Predictions.read(self.out).get("cases", {})
        for case in self.images:
            if case in cases:
                self.result.cases[case] = cases[case]
                if case not in self.result.problems:
                    self.deliver(case)
        if not (together and self.result.problems):
            shutil.rmtree(self.state / _IMAGES, ignore_errors=True)
        if not self.result.problems:
            shutil.rmtree(self.state / _FETCHING, ignore_errors=True)

    def _is_whole(self, case: str, earlier: Mapping[str, Any]) -> bool:
        """Return whether ``OUT`` has this model's objects of a case."""
        files = object_files(self.out, case)
        return case in earlier and all(
            files[kind].is_file()
            and pydicom.dcmread(files[kind], specific_tags=["SeriesInstanceUID"]).SeriesInstanceUID
            == self._series_uid(case, kind)
            for kind in self.kinds
        )

    def _series_uid(self, case: str, kind: ObjectKind) -> str:
        return self.identity(further=self.further(case)).series_uid(self.images[case][0].uid, kind)

    def further(self, case: str) -> dict[str, str]:
        """Return what else identifies a case's image: its series after the first, by channel; its volume."""
        uids = [series.uid for series in self.images[case]]
        names = [*self.studies.channels] if self.named else []
        volume = {"--volume": self.studies.volume} if self.studies.volume else {}
        return volume | dict([*zip(channel_keys(names, len(uids)), uids, strict=True)][1:])


def _part(case: str, number: int) -> str:
    """Return the name of a channel in the folder of a case; the first channel has the name of the case."""
    return f"channel{number}" if number else case


class _Book:
    """The site's list of pseudonyms, their studies, and the stored objects."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._studies: dict[str, Any] = read_list(path, _KIND, _VERSION).get("studies", {})

    def enter(self, plan: StudyPlan, volume: str | None) -> bool:
        """List a study, and return whether an earlier call chose the same image."""
        assert plan.study is not None
        image = {
            "SeriesInstanceUID": plan.images[0].uid,
            **({"channels": [series.uid for series in plan.images]} if len(plan.images) > 1 else {}),
            **({"volume": volume} if volume else {}),
        }
        earlier = self._studies.get(plan.case, {})
        self._studies[plan.case] = {
            "stored": earlier.get("stored", {}),
            "PatientID": plan.study.patient,
            "AccessionNumber": plan.study.accession,
            "StudyInstanceUID": plan.study.uid,
            **image,
        }
        self._save()
        return all(earlier.get(key) == image.get(key) for key in ("SeriesInstanceUID", "channels", "volume"))

    def stored(self, case: str, kind: ObjectKind, dataset: pydicom.Dataset) -> None:
        self._studies[case]["stored"][kind.word] = {
            "SeriesInstanceUID": str(dataset.SeriesInstanceUID),
            "SOPInstanceUID": str(dataset.SOPInstanceUID),
            "at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }
        self._save()

    def _save(self) -> None:
        write_versioned(self._path, _KIND, _VERSION, {"studies": self._studies}, private=True)
