"""`import_studies`: studies of an archive as a site's data folder, under pseudonyms."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from medfedaug.data.io.dicom_series import DicomSeries
from medfedaug.data.pacs.archive import Archive, ArchiveError, FetchError, FoundSeries, require_pacs
from medfedaug.data.pacs.archive_changes import taken_series
from medfedaug.data.pacs.case_files import CaseFiles
from medfedaug.data.pacs.choice import Planned
from medfedaug.data.pacs.import_settings import ImportSettings
from medfedaug.data.pacs.label_choice import LabelRefused, choose_outlines, possible_outlines
from medfedaug.data.pacs.label_grid import LabelGrid
from medfedaug.data.pacs.label_objects import LabelObject, class_of
from medfedaug.data.pacs.object_check import check_references, reading_objects
from medfedaug.data.pacs.patience import Patience
from medfedaug.data.pacs.study_list import StudyList
from medfedaug.data.pacs.volume import load_on_grid, open_volume, write_nifti
from medfedaug.data.pacs.withdrawal import finish_withdrawals
from medfedaug.errors import ConfigError, ReaderError
from medfedaug.utils.files import private_folder

if TYPE_CHECKING:
    from medfedaug.data.pacs.deidentify import Deidentifier


@dataclass(frozen=True)
class ImportOutcome:
    """Outcome of an import, by case.

    Args:
        problems: reasons why a study was not imported.
        notes: decisions about the label map of a study that this call imported.
        refreshed: versions of the cases that a refresh replaced.
        set_aside: versions that a refresh took out of the data folder: their studies would be refused now.
    """

    problems: dict[str, str] = field(default_factory=dict)
    notes: dict[str, Sequence[str]] = field(default_factory=dict)
    refreshed: dict[str, int] = field(default_factory=dict)
    set_aside: dict[str, int] = field(default_factory=dict)


def import_studies(
    archive: Archive,
    plans: Sequence[Planned],
    out: Path,
    state: Path,
    settings: ImportSettings,
    on_event: Callable[[dict[str, object]], object] = lambda event: None,
    *,
    changed: Collection[str] = (),
    new_uid: Callable[[str], str] | None = None,
) -> ImportOutcome:
    """Fetch and convert the studies of a plan; those that are there already are kept.

    With ``settings.refresh``, those that changed are taken again. One that would be refused now is taken out
    of the data folder; one that cannot be fetched stays. The version before is kept.

    ``on_event`` is called from several threads with ``start`` (``todo``, ``there``, ``objects``),
    ``object`` for each that came, ``remark`` (``case``, ``text``), ``imported`` and ``failed``
    (``case``). ``changed`` are cases of which the archive has something else than what was taken. With
    ``settings.anonymise``, ``new_uid`` gives the UID in place of another one, with the site's key.

    Raises:
        ArchiveError: where the archive cannot be used any more; what is imported stays.
        ConfigError: where another import writes to the folder, or earlier ones had other settings.
    """
    deidentifier = None
    if settings.anonymise:
        require_pacs("dicomanonymizer")
        from medfedaug.data.pacs.deidentify import Deidentifier

        if new_uid is None:
            raise ConfigError("objects without identity need UIDs of the site's own key")
        deidentifier = Deidentifier(new_uid, lambda name: class_of(name, settings.segments))
    files = CaseFiles(out, state)
    with files.locked():
        return _Import(archive, files, StudyList(state), settings, on_event, deidentifier).run(plans, changed)


class _Import:
    """Import into one folder.

    Several studies are converted at a time, and as many series fetched.
    """

    def __init__(
        self,
        archive: Archive,
        files: CaseFiles,
        studies: StudyList,
        settings: ImportSettings,
        on_event: Callable[[dict[str, object]], object],
        deidentifier: Deidentifier | None,
    ) -> None:
        self._archive, self._files, self._studies = archive, files, studies
        self._settings, self._on_event = settings, on_event
        self._deidentifier = deidentifier
        self._patience = Patience(archive.place, answered=True)
        self._given_up = threading.Event()
        self._fetching = ThreadPoolExecutor(settings.parallel)
        self._outcome = ImportOutcome()

    def run(self, plans: Sequence[Planned], changed: Collection[str]) -> ImportOutcome:
        """Import the studies."""
        settings, files, studies = self._settings, self._files, self._studies
        studies.settle(settings)
        files.remove_unfinished()
        finish_withdrawals(studies, files)
        for plan in plans:
            if plan.patient in studies.withdrawn:
                plan.problem = "the patient was withdrawn"
                files.remove(plan.case)
        again = {*changed} if settings.refresh else set()
        for plan in plans:
            if plan.problem and plan.study is not None and plan.case in again:
                self._take_out(plan)
        sound = [plan for plan in plans if not plan.problem]
        todo = [
            plan
            for plan in sound
            if plan.case not in studies.studies or plan.case in again or not files.whole(plan.case, settings)
        ]
        failed = self._outcome.problems
        failed.update({plan.case: plan.problem for plan in plans if plan.problem})
        objects = sum(plan.objects for plan in todo)
        self._on_event(
            {"event": "start", "todo": len(todo), "there": len(sound) - len(todo), "objects": objects}
        )
        with self._fetching, ThreadPoolExecutor(settings.parallel) as converting:
            futures = [(plan, converting.submit(self._import, plan)) for plan in todo]
            try:
                for plan, future in futures:
                    if problem := future.result():
                        failed[plan.case] = problem
            except BaseException:
                self._given_up.set()
                for pool in (converting, self._fetching):
                    pool.shutdown(cancel_futures=True, wait=False)
                raise
        # Not after an interruption: a split of some patients would bind the others.
        files.write_listing(studies.studies, settings)
        kept = studies.kept_versions(settings.keep_versions)
        studies.save()
        files.earlier.trim(kept)
        return self._outcome

    def _take_out(self, plan: Planned) -> None:
        """Take a case out of the data folder whose study would be refused now; one in the list is kept."""
        if plan.case not in self._studies.studies:
            self._files.unlink(plan.case)  # nobody could withdraw what no list has
        elif self._files.whole(plan.case, self._settings):
            version = self._studies.version(plan.case)
            self._files.set_aside(plan.case, version)
            self._outcome.set_aside[plan.case] = version

    def _import(self, plan: Planned) -> str:
        """Import one study, and return its problem; empty where there is none."""
        if self._given_up.is_set():
            return ""
        staging = self._files.staging(plan.case)
        private_folder(staging)
        problem = ""
        try:
            with reading_objects():
                self._convert(plan, staging)
        except ReaderError as error:
            problem = str(error)
            self._take_out(plan)
            if isinstance(error, LabelRefused):
                self._studies.refuse(plan, error.segments)
        except (FetchError, ArchiveError) as error:
            # Its objects stay, and the next call asks for those that are missing alone.
            self._on_event({"event": "failed", "case": plan.case})
            try:
                return self._patience.problem(error)
            except ArchiveError:
                self._given_up.set()
                raise
        self._patience.heard()
        shutil.rmtree(staging, ignore_errors=True)
        self._on_event({"event": "failed" if problem else "imported", "case": plan.case})
        return problem

    def _convert(self, plan: Planned, staging: Path) -> None:
        settings = self._settings
        coming = [self._fetch(one, staging / f"label{n}") for n, one in enumerate(plan.labels)]
        images, objects = plan.images, None
        if len(images) > max(1, len(settings.channels)):
            objects = _label_objects(_came(coming))
            images = [_referred(images, possible_outlines(objects, settings) or objects)]
        coming += [self._fetch(one, staging / f"image{n}") for n, one in enumerate(images)]
        found = _came(coming)[: len(plan.labels)]
        rules: list[str | None] = [*settings.channels.values()] or [settings.series]
        volumes = [
            open_volume(staging / f"image{n}", rule, allow_burned_in=settings.allow_burned_in)
            for n, rule in enumerate(rules)
        ]
        for remark in dict.fromkeys(text for one in volumes for text in one.remarks):
            self._on_event({"event": "remark", "case": plan.case, "text": remark})
        grid, objects = volumes[0], objects if objects is not None else _label_objects(found)
        label: np.ndarray | None = None
        notes: list[str] = []
        if settings.labelled:
            some = possible_outlines(objects, settings) or objects
            named = set().union(*(one.references for one in some))
            grid = next((one for one in volumes if one.uid in named), grid)
            if grid.uid not in named:
                raise ReaderError("none of its label maps refers to its image")
            label, notes = _label_map(grid, objects, settings)
        differs = self._write(plan, volumes, grid, label, _came(coming))
        instances = {one.uid: [piece.instance for piece in one.slices] for one in volumes}
        taken = taken_series(plan, instances, objects)
        self._studies.enter(plan, [one.uid for one in images], taken, notes, differs)
        self._outcome.notes[plan.case] = notes
        if differs:
            self._outcome.refreshed[plan.case] = self._studies.version(plan.case)

    def _write(
        self,
        plan: Planned,
        volumes: Sequence[DicomSeries],
        grid: DicomSeries,
        label: np.ndarray | None,
        objects: Sequence[Sequence[Path]],
    ) -> bool | None:
        """Write the files of a case, and keep those before.

        Returns:
            Whether they hold something else than those before; ``None`` where there were none.
        """
        files, case = self._files, plan.case
        images = load_on_grid(volumes, grid)
        there = case in self._studies.studies and files.whole(case, self._settings)
        version = self._studies.version(case) if there else 0
        if there:
            files.keep(case, version)
        assert grid.affine is not None
        for path, voxels in zip(files.images(case, self._settings.channels), images, strict=True):
            write_nifti(path, voxels, grid.affine)
        if label is not None:
            write_nifti(files.label(case), label, grid.affine)
        if self._deidentifier is not None:
            _keep_objects(self._deidentifier, objects, files.dicom(case), plan)
        return files.earlier.restore_equal(case, version) if there else None

    def _fetch(self, series: FoundSeries, folder: Path) -> Future[list[Path]]:
        arrived = {"event": "object"}
        return self._fetching.submit(self._archive.fetch, series, folder, lambda: self._on_event({**arrived}))


def _keep_objects(
    deidentifier: Deidentifier, series: Sequence[Sequence[Path]], folder: Path, plan: Planned
) -> None:
    """Write the objects of a case without identity; a file's name is its new UID."""
    shutil.rmtree(folder, ignore_errors=True)
    with reading_objects("an object cannot be written without identity"):
        for files in series:
            deidentifier.write(files, folder, patient=plan.patient, study=plan.case.removeprefix("case-"))


def _came(coming: Sequence[Future[list[Path]]]) -> list[list[Path]]:
    """The files of several series, once all have come or failed: half a study is kept, too."""
    wait(coming)
    return [future.result() for future in coming]


def _label_objects(series: Sequence[Sequence[Path]]) -> list[LabelObject]:
    """Open label objects."""
    return [LabelObject.read(file) for files in series for file in files]


def _referred(images: Sequence[FoundSeries], objects: Sequence[LabelObject]) -> FoundSeries:
    named = set().union(*(one.references for one in objects))
    found = [one for one in images if one.uid in named]
    if len(found) != 1:
        what = "none" if not found else f"{len(found)}"
        raise ReaderError(
            f"its label maps refer to {what} of {len(images)} possible images; choose one with --series"
        )
    return found[0]


def _label_map(
    grid: DicomSeries, objects: Sequence[LabelObject], settings: ImportSettings
) -> tuple[np.ndarray, list[str]]:
    """The label map of an image, and what was decided about it."""
    outlines, notes = choose_outlines([one for one in objects if grid.uid in one.references], settings)
    label = LabelGrid(grid, settings)
    for outline in outlines:
        check_references(outline.source.dataset, grid)
        with reading_objects("a label object is damaged"):
            label.add(outline.source.dataset, outline.classes)
    if label.crossed:
        notes.append(f"contours that cross in {label.crossed} slices: united")
    return label.voxels, notes
