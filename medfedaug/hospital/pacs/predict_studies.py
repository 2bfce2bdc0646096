"""`predict_studies`: predict studies of an archive, and store the objects with their images."""

from __future__ import annotations

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
from medfedaug.hospital.dicom.identity import ModelIdentity, ObjectKind
from medfedaug.hospital.dicom.prediction_objects import (
    channel_keys,
    object_files,
    object_identity,
)
from medfedaug.hospital.dicom.series import scan
from medfedaug.hospital.pacs.archive import (
    Archive,
    ArchiveError,
    ArchiveSeries,
    FetchError,
    Patience,
    StudyQuery,
)
from medfedaug.hospital.pacs.choice import StudyPlan, plan_import
from medfedaug.hospital.pacs.import_settings import ImportSettings
from medfedaug.hospital.pacs.object_check import reading_objects
from medfedaug.hospital.pacs.study_list import StudyList
from medfedaug.hospital.pacs.study_options import StudyOptions
from medfedaug.hospital.pacs.volume import choose_volume, load_on_grid, open_volume, write_nifti
from medfedaug.hospital.privacy.pseudonyms import Pseudonyms
from medfedaug.runs.folder import only_process
from medfedaug.runs.input_statistics import Origin
from medfedaug.runs.prediction.ensemble import Ensemble
from medfedaug.runs.prediction.options import PredictionOptions
from medfedaug.runs.prediction.predict import Event, predict_images, uses_given_images
from medfedaug.runs.prediction.predictions_file import Predictions
from medfedaug.utils.files import parse_versioned, private_folder, write_json, write_versioned

_LIST, _KIND, _VERSION = "studies.json", "predicted-studies", 1
_IMAGES, _FETCHED, _FETCHING = "images", "fetched", "fetching"
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
    models: Ensemble,
    archive: Archive,
    wanted: Sequence[StudyQuery],
    out: Path,
    options: PredictionOptions,
    studies: StudyOptions,
    *,
    on_event: Event | None = None,
) -> StudyPredictions:
    """Fetch studies, predict them, and store the predictions with their images.

    A study is skipped if the archive already has all objects of this model. A study that cannot be fetched,
    predicted or stored does not stop the others. A second call continues an interrupted one.

    A few studies are fetched, predicted, and their images removed, before the next ones.
    If the statistics of all images normalise them, all studies are fetched first, and kept in ``OUT.state``
    until all are done.

    Raises:
        ConfigError: where nothing can be predicted, before anything is fetched.
        ArchiveError: where the archive does not answer, or refuses several objects one after another; stored
            objects stay.
    """
    _check_options(models.first.config, studies)
    tell = on_event or (lambda event: None)
    origin = Origin.of(models.first, options.site, options.statistics)
    state = out.with_name(f"{out.name}.state")
    private_folder(state)
    with only_process(state):
        book = _Book(state / _LIST)
        settings = ImportSettings(
            series=options.series,
            volume=studies.volume,
            channels=studies.channels,
            allow_burned_in=True,
            parallel=studies.parallel,
        )
        pseudonyms = studies.pseudonyms or state
        plans = plan_import(archive, wanted, Pseudonyms.of_site(pseudonyms).of, settings, tell)
        if studies.pseudonyms is not None:
            _leave_out_withdrawn(plans, pseudonyms)
        job = _Job(
            archive=archive,
            out=out,
            state=state,
            identity=partial(object_identity, models, origin),
            kinds=(ObjectKind.SEGMENTATION, *([ObjectKind.RTSTRUCT] if options.rtstruct else [])),
            channels=studies.channels,
            series=options.series,
            volume=studies.volume,
            named=bool(models.first.config.channel_names),
            book=book,
            tell=tell,
            store=studies.store,
            patience=Patience(answered=True),
        )
        todo = job.open_studies(plans, fresh=options.overwrite)

        def predict(cases: Sequence[str], first: bool) -> None:
            predictions = predict_images(
                models,
                state / _IMAGES,
                out,
                replace(options, series=None, overwrite=options.overwrite and first),
                further={case: job.further(case) for case in cases},
                among=todo,
                on_event=_merged(tell, len(todo), first=first),
                on_case=job.deliver,
            )
            job.result.problems |= {n: e["error"] for n, e in predictions.failed.items() if n in cases}

        together = uses_given_images(models.first, origin)
        job.carry_out(todo, predict, studies.parallel, together=together)
        job.finish()
        return job.result


def _merged(tell: Event, total: int, *, first: bool) -> Event:
    """Merge the events of several predictions: a single start, and each note once."""

    def merged(event: dict[str, Any]) -> None:
        if event["event"] == "start":
            if first:
                tell({**event, "cases": total, "todo": total - event["there"]})
        elif first or event["event"] not in ("note", "left_out"):
            tell(event)

    return merged


def _leave_out_withdrawn(plans: Sequence[StudyPlan], folder: Path) -> None:
    """Refuse studies of withdrawn patients, by the import's list in the folder of the site's key."""
    withdrawn = StudyList(folder).withdrawn
    for plan in plans:
        if plan.patient in withdrawn:
            plan.problem = "the patient was withdrawn"


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
    identity: Callable[..., ModelIdentity]
    kinds: Sequence[ObjectKind]
    channels: Mapping[str, str]
    series: str | None
    volume: str | None
    named: bool
    book: _Book
    tell: Event
    store: bool
    patience: Patience
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
            if self.store and not self._ask(plan):
                continue
            if not self.book.enter(plan, self.volume):
                self._forget(plan.case)
            done = self.store and not self.missing[plan.case]
            # An interrupted call's finished cases, too: statistics may be of all images.
            kept = any((self.state / part / plan.case).is_dir() for part in (_IMAGES, _FETCHED))
            if kept or not (done or self._is_whole(plan.case, earlier)):
                todo.append(plan.case)
        return todo

    def _forget(self, case: str) -> None:
        """Remove what an interrupted call fetched of a case."""
        for part in (_IMAGES, _FETCHED, _FETCHING):
            shutil.rmtree(self.state / part / case, ignore_errors=True)

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

    def carry_out(
        self,
        todo: Sequence[str],
        predict: Callable[[Sequence[str], bool], None],
        parallel: int,
        *,
        together: bool,
    ) -> None:
        """Fetch and predict cases in batches, in a single one if the result depends on all images."""
        self._tidy(todo)
        size = len(todo) if together else 2 * parallel
        first = True
        with ThreadPoolExecutor(parallel) as pool:
            for start in range(0, len(todo), max(1, size)):
                batch, fetched = todo[start : start + size], []
                came = zip(batch, pool.map(self._fetched, batch), strict=True)
                for number, (case, is_there) in enumerate(came, start=1):
                    fetched += [case] if is_there else []
                    if not start:
                        self.tell({"event": "fetched", "number": number, "of": len(batch)})
                for case in fetched:
                    self._place(case)
                if fetched:
                    predict(fetched, first)
                    first = False
                if not together:
                    shutil.rmtree(self.state / _IMAGES, ignore_errors=True)

    def _tidy(self, todo: Sequence[str]) -> None:
        """Remove images of other cases, and set the images of an interrupted call aside until their turn."""
        for part in (_IMAGES, _FETCHED, _FETCHING):
            for path in (self.state / part).glob("*"):
                if path.name not in todo:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
                elif part == _IMAGES:
                    private_folder(self.state / _FETCHED)
                    os.replace(path, self.state / _FETCHED / path.name)

    def _fetched(self, case: str) -> bool:
        """Fetch a case, or record the reason why it cannot be fetched."""
        try:
            with reading_objects():
                self._fetch(case)
        except ReaderError as error:
            self.result.problems[case] = str(error)
            shutil.rmtree(self.state / _FETCHING / case)
        except (FetchError, ArchiveError) as error:
            # Its fetched objects stay, and the next call asks for the missing ones alone.
            self.result.problems[case] = self.patience.problem(error)
        else:
            return True
        return False

    def _fetch(self, case: str) -> None:
        place, folder = self.state / _FETCHED / case, self.state / _FETCHING / case
        if place.is_dir():  # whole, of an earlier call
            return
        private_folder(folder)
        private_folder(place.parent)
        for number, series in enumerate(self.images[case]):
            self.archive.fetch(series, folder / _part(case, number) if self.channels else folder)
        self.patience.heard()
        if self.channels:
            self._join_channels(case, folder)
        else:
            self._keep_volume(folder, self.series)
        os.replace(folder, place)

    def _keep_volume(self, folder: Path, rule: str | None) -> None:
        """Remove the files of the other volumes of a fetched series."""
        volumes = scan(folder).series
        chosen = choose_volume(volumes, rule, self.volume)
        others = {file for one in volumes if one is not chosen for file in one.files}
        if not others.isdisjoint(chosen.files):
            raise ReaderError("its volumes share a file; `medfedaug import` can read one")
        for file in others:
            file.unlink()

    def _join_channels(self, case: str, folder: Path) -> None:
        """Resample the other channels to the grid of the first one, as NIfTI next to its series."""
        parts = [folder / _part(case, number) for number in range(len(self.channels))]
        volumes = [
            open_volume(part, rule, allow_burned_in=True, volume=self.volume)
            for part, rule in zip(parts, self.channels.values(), strict=True)
        ]
        grid = volumes[0]
        assert grid.affine is not None
        for part, voxels in zip(parts[1:], load_on_grid(volumes, grid)[1:], strict=True):
            write_nifti(part.with_name(f"{part.name}.nii.gz"), voxels, grid.affine)
        for part in parts[1:]:
            shutil.rmtree(part)
        self._keep_volume(parts[0], next(iter(self.channels.values())))

    def _place(self, case: str) -> None:
        """Move the images of a case to their folder of prediction, and list them if they have channels."""
        images = self.state / _IMAGES
        private_folder(images)
        os.replace(self.state / _FETCHED / case, images / case)
        if not self.channels:
            return
        cases = sorted(path.name for path in images.iterdir() if path.is_dir())
        others = [f"{_part('', n)}.nii.gz" for n in range(1, len(self.channels))]
        rows = [{"image": [f"{name}/{file}" for file in (_part(name, 0), *others)]} for name in cases]
        names = {str(n): name for n, name in enumerate(self.channels)} if self.named else {}
        content = {**({"channel_names": names} if names else {}), "test": rows}
        write_json(images / "dataset.json", content)

    def deliver(self, case: str) -> None:
        """Store the objects of a predicted case that the archive lacks."""
        if not self.missing.get(case):
            return
        files = object_files(self.out, case)
        try:
            for kind in [*self.missing[case]]:
                dataset = pydicom.dcmread(files[kind])
                self.archive.store([dataset])
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

    def finish(self) -> None:
        """Store the predictions of an earlier call, and remove the images when all is done."""
        cases = Predictions.read(self.out).get("cases", {})
        for case in self.images:
            if case in cases:
                self.result.cases[case] = cases[case]
                if case not in self.result.problems:
                    self.deliver(case)
        if not self.result.problems:
            for part in (_IMAGES, _FETCHED, _FETCHING):
                shutil.rmtree(self.state / part, ignore_errors=True)

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
        names = [*self.channels] if self.named else []
        volume = {"--volume": self.volume} if self.volume else {}
        return volume | dict([*zip(channel_keys(names, len(uids)), uids, strict=True)][1:])


def _part(case: str, number: int) -> str:
    """Return the name of a channel in the folder of a case; the first channel has the name of the case."""
    return f"channel{number}" if number else case


class _Book:
    """The site's list of pseudonyms, their studies, and the stored objects."""

    def __init__(self, path: Path) -> None:
        self._path = path
        content: dict[str, Any] = {"studies": {}}
        if path.exists():
            try:
                content = parse_versioned(path.read_text(encoding="utf-8"), _KIND, _VERSION)
            except ValueError as error:
                raise ConfigError(f"{path}: not readable; restore it from a copy") from error
        self._studies: dict[str, Any] = content["studies"]

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
