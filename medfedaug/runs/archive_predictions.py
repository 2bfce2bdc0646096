"""`predict_studies`: studies of an archive predicted, and the objects stored beside their images."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pydicom

from medfedaug.data.io.dicom_identity import ModelIdentity, ObjectKind
from medfedaug.data.io.dicom_series import scan
from medfedaug.data.pacs.archive import Archive, ArchiveError, FetchError, FoundSeries, Wanted
from medfedaug.data.pacs.choice import ImportSettings, Planned, plan_import
from medfedaug.data.pacs.patience import Patience
from medfedaug.errors import ConfigError, ReaderError
from medfedaug.privacy.pseudonyms import Pseudonyms
from medfedaug.runs.ensemble import Ensemble
from medfedaug.runs.folder import only_process
from medfedaug.runs.predict import Event, object_files, predict_images
from medfedaug.runs.predictions_file import Predictions
from medfedaug.utils.files import parse_versioned, private_folder, write_versioned

__all__ = ["StudyPredictions", "predict_studies"]

_LIST, _KIND, _VERSION = "studies.json", "predicted-studies", 1
_IMAGES, _FETCHING = "images", "fetching"
_MOST_FAILURES = 3
"""Objects that an archive refuses one after another before nothing more is sent."""


@dataclass
class StudyPredictions:
    """Outcome of `predict_studies`, by the pseudonym of each study.

    Args:
        cases: of ``predictions.json``, of the studies that were asked for.
        stored: kinds of the objects that this call stored.
        there: kinds of the objects that the archive had already.
        problems: reasons why a study has no prediction, or an object was not stored.
    """

    cases: dict[str, Any] = field(default_factory=dict)
    stored: dict[str, list[str]] = field(default_factory=dict)
    there: dict[str, list[str]] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)


def predict_studies(
    models: Ensemble,
    archive: Archive,
    wanted: Sequence[Wanted],
    out: Path,
    *,
    objects: Sequence[ObjectKind] = (),
    store: bool = False,
    again: bool = False,
    site: str | None = None,
    series: str | None = None,
    overwrite: bool = False,
    parallel: int = 2,
    on_event: Event | None = None,
    **options: Any,
) -> StudyPredictions:
    """Fetch studies, predict them, and store the predictions beside their images.

    A study of which the archive has all objects of this model already is not fetched. A study that cannot be
    fetched, predicted or stored does not stop the others. Called again, it goes on where it stopped.

    Images are kept in ``OUT.state`` until all studies are done, since statistics may be of all of them.

    Args:
        models: one run, or several.
        archive: the archive.
        wanted: the studies.
        out: the folder of `medfedaug.runs.predict.predict_images`, whose cases have pseudonyms.
        objects: kinds of objects besides the DICOM SEG.
        store: whether objects are stored in the archive.
        again: whether other objects are stored where the archive has this model's objects already.
        site: the site whose images they are.
        series: UID of the image's series, or regular expression for number, description and modality.
        overwrite: delete what an earlier call wrote to ``out`` and start anew.
        parallel: studies that are fetched at a time.
        on_event: called with a small dictionary for everything that a user may want to see.
        **options: others of `medfedaug.runs.predict.predict_images`.

    Raises:
        ConfigError: where nothing can be predicted, before anything is fetched.
        ArchiveError: where the archive does not answer, or refuses several objects one after another; what
            is stored stays.
    """
    if models.first.config.task != "segmentation":
        raise ConfigError(
            "the run classifies photographs, which no archive of DICOM studies has; give --images"
        )
    if again and not store:
        raise ConfigError("--again goes with --store")
    tell = on_event or (lambda event: None)
    state = out.with_name(f"{out.name}.state")
    private_folder(state)
    with only_process(state):
        book = _Book(state / _LIST, again=again, overwrite=overwrite)
        identity = ModelIdentity(models.sha256, site or "", book.again)
        plans = plan_import(
            archive,
            wanted,
            Pseudonyms.of_site(state).of,
            ImportSettings(series=series, allow_burned_in=True, parallel=parallel),
            tell,
        )
        kinds = (ObjectKind.SEGMENTATION, *objects)
        job = _Job(
            archive=archive,
            out=out,
            state=state,
            identity=identity,
            kinds=kinds,
            book=book,
            tell=tell,
            store=store,
            patience=Patience(archive.place, answered=True),
        )
        todo = job.open_studies(plans, fresh=overwrite)
        if fetched := job.fetch(todo, parallel):
            found = predict_images(
                models,
                state / _IMAGES,
                out,
                site=site,
                objects=objects,
                again=book.again,
                overwrite=overwrite,
                on_event=on_event,
                on_case=job.deliver,
                **options,
            )
            problems = {name: entry["error"] for name, entry in found.failed.items() if name in fetched}
            job.result.problems |= problems
        job.finish()
        return job.result


@dataclass
class _Job:
    """One call: what is to be stored of each study, and what became of it."""

    archive: Archive
    out: Path
    state: Path
    identity: ModelIdentity
    kinds: Sequence[ObjectKind]
    book: _Book
    tell: Event
    store: bool
    patience: Patience
    images: dict[str, FoundSeries] = field(default_factory=dict)
    missing: dict[str, list[ObjectKind]] = field(default_factory=dict)
    failures: int = 0
    result: StudyPredictions = field(default_factory=StudyPredictions)

    def open_studies(self, plans: Sequence[Planned], *, fresh: bool) -> list[str]:
        """Ask the archive what it has already, and return the cases that have to be fetched."""
        earlier = {} if fresh else Predictions.read(self.out).get("cases", {})
        todo = []
        for plan in plans:
            if plan.problem:
                self.result.problems[plan.case] = plan.problem
                continue
            (self.images[plan.case],) = plan.images
            if self.store and not self._ask(plan):
                continue
            done = self.store and not self.missing[plan.case]
            # Of an interrupted call a finished case, too: statistics may be of all images.
            if (self.state / _IMAGES / plan.case).is_dir() or not (
                done or self._is_whole(plan.case, earlier)
            ):
                todo.append(plan.case)
            self.book.enter(plan)
        return todo

    def _ask(self, plan: Planned) -> bool:
        """Ask the archive for objects of this model; false where it does not say."""
        assert plan.study is not None
        try:
            uids = {one.uid for one in self.archive.find_series(plan.study)}
            self.patience.heard()
        except ArchiveError as error:
            self.result.problems[plan.case] = self.patience.problem(error)
            return False
        there = [kind for kind in self.kinds if self._series_uid(plan.case, kind) in uids]
        self.missing[plan.case] = [kind for kind in self.kinds if kind not in there]
        if there:
            self.result.there[plan.case] = [kind.word for kind in there]
        return True

    def fetch(self, todo: Sequence[str], parallel: int) -> set[str]:
        """Fetch the images of cases, and remove those of others; the cases whose images are there."""
        for part in (_IMAGES, _FETCHING):
            for folder in (self.state / part).glob("*"):
                if folder.name not in todo:
                    shutil.rmtree(folder)
        fetched: set[str] = set()

        def one(case: str) -> None:
            try:
                self._fetch(case)
            except ReaderError as error:
                self.result.problems[case] = str(error)
                shutil.rmtree(self.state / _FETCHING / case)
            except (FetchError, ArchiveError) as error:
                # Its objects stay, and the next call asks for those that are missing alone.
                self.result.problems[case] = self.patience.problem(error)
            else:
                fetched.add(case)

        with ThreadPoolExecutor(parallel) as pool:
            futures = [pool.submit(one, case) for case in todo]
            try:
                for number, future in enumerate(futures, start=1):
                    future.result()
                    self.tell({"event": "fetched", "number": number, "of": len(todo)})
            finally:
                pool.shutdown(cancel_futures=True)
        return fetched

    def _fetch(self, case: str) -> None:
        place, folder = self.state / _IMAGES / case, self.state / _FETCHING / case
        if place.is_dir():  # whole, of an earlier call
            return
        private_folder(folder)
        private_folder(place.parent)
        self.archive.fetch(self.images[case], folder)
        self.patience.heard()
        volumes = scan(folder).series
        if len(volumes) != 1:
            raise ReaderError(
                f"the series holds {len(volumes)} volumes, one was expected; export it, and give --images"
            )
        os.replace(folder, place)

    def deliver(self, case: str) -> None:
        """Store the objects of a predicted case that the archive does not have.

        Raises:
            ArchiveError: where it refuses several cases one after another.
        """
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
                raise ArchiveError(f"{error}; run the same command again to go on") from error
            self.result.problems[case] = str(error)
        else:
            self.failures = 0

    def finish(self) -> None:
        """Store what an earlier call predicted, and remove the images where nothing is left to do."""
        cases = Predictions.read(self.out).get("cases", {})
        for case in self.images:
            if case in cases:
                self.result.cases[case] = cases[case]
                if case not in self.result.problems:
                    self.deliver(case)
        if not self.result.problems:
            for part in (_IMAGES, _FETCHING):
                shutil.rmtree(self.state / part, ignore_errors=True)

    def _is_whole(self, case: str, earlier: Mapping[str, Any]) -> bool:
        """Return whether the objects of a case are in ``OUT``, and of this model."""
        files = object_files(self.out, case)
        if case not in earlier or not all(files[kind].is_file() for kind in self.kinds):
            return False
        return all(
            pydicom.dcmread(files[kind], specific_tags=["SeriesInstanceUID"]).SeriesInstanceUID
            == self._series_uid(case, kind)
            for kind in self.kinds
        )

    def _series_uid(self, case: str, kind: ObjectKind) -> str:
        return self.identity.series_uid(self.images[case].uid, kind)


class _Book:
    """The site's own list: which pseudonym is which study, and what was stored of it."""

    def __init__(self, path: Path, *, again: bool, overwrite: bool) -> None:
        self._path = path
        content: dict[str, Any] = {"again": "", "studies": {}}
        if path.exists():
            try:
                content = parse_versioned(path.read_text(encoding="utf-8"), _KIND, _VERSION)
            except ValueError as error:
                raise ConfigError(f"{path}: not readable; restore it from a copy") from error
            if bool(content["again"]) != again and not overwrite:
                mode = "with" if content["again"] else "without"
                raise ConfigError(
                    f"{path.parent} is of predictions {mode} --again; choose another --out, or --overwrite"
                )
        self._studies: dict[str, Any] = content["studies"]
        self.again = str(content["again"])
        if again and (overwrite or not self.again):
            self.again = datetime.now(timezone.utc).isoformat()
        elif not again:
            self.again = ""

    def enter(self, plan: Planned) -> None:
        assert plan.study is not None
        entry = self._studies.setdefault(plan.case, {"stored": {}})
        entry |= {
            "PatientID": plan.study.patient,
            "AccessionNumber": plan.study.accession,
            "StudyInstanceUID": plan.study.uid,
            "SeriesInstanceUID": plan.images[0].uid,
        }
        self._save()

    def stored(self, case: str, kind: ObjectKind, dataset: pydicom.Dataset) -> None:
        self._studies[case]["stored"][kind.word] = {
            "SeriesInstanceUID": str(dataset.SeriesInstanceUID),
            "SOPInstanceUID": str(dataset.SOPInstanceUID),
            "at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }
        self._save()

    def _save(self) -> None:
        content = {"again": self.again, "studies": self._studies}
        write_versioned(self._path, _KIND, _VERSION, content, private=True)
