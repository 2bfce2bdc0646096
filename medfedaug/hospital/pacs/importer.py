"""`import_studies`: import studies of an archive into a site's data folder, under pseudonyms."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from medfedaug.errors import ReaderError
from medfedaug.hospital.dicom.checks import require
from medfedaug.hospital.dicom.series import DicomSeries
from medfedaug.hospital.pacs.archive import Archive, ArchiveError, ArchiveSeries, Patience
from medfedaug.hospital.pacs.choice import StudyPlan
from medfedaug.hospital.pacs.import_folder import CaseFiles, StudyList, finish_withdrawals
from medfedaug.hospital.pacs.label_objects import (
    LabelGrid,
    LabelObject,
    LabelRefused,
    choose_outlines,
    class_of,
    possible_outlines,
)
from medfedaug.hospital.pacs.object_check import check_references, reading_objects
from medfedaug.hospital.pacs.settings import ImportSettings
from medfedaug.hospital.pacs.volume import load_on_grid, open_volume, write_nifti
from medfedaug.utils.files import private_folder
from medfedaug.utils.plugins import import_extra

if TYPE_CHECKING:
    from medfedaug.hospital.pacs.deidentify import Deidentifier


@dataclass(frozen=True)
class ImportOutcome:
    """Outcome of an import, by case."""

    problems: dict[str, str] = field(default_factory=dict)  # reasons why a study was not imported
    taken_out: list[str] = field(default_factory=list)  # by a refresh, since their studies are now refused


def import_studies(
    archive: Archive,
    plans: Sequence[StudyPlan],
    out: Path,
    state: Path,
    settings: ImportSettings,
    new_uid: Callable[[str], str],
    on_event: Callable[[dict[str, object]], object] = lambda event: None,
) -> ImportOutcome:
    """Fetch and convert the studies of a plan; skip imported ones, unless ``settings.refresh`` is true.

    A study that is now refused is then taken out of the data folder; one that cannot be fetched stays.

    ``on_event`` is called from several threads with ``start`` (``todo``, ``there``, ``objects``),
    ``object`` for each arrival, ``remark`` (``case``, ``text``), ``imported`` and ``failed`` (``case``).
    ``new_uid`` replaces a UID, with the site's key. An archive that becomes unusable ends the import;
    imported studies stay.
    """
    deidentifier = None
    if settings.anonymise:
        import_extra("dicomanonymizer", "pacs", "--anonymise")
        from medfedaug.hospital.pacs.deidentify import Deidentifier

        deidentifier = Deidentifier(new_uid, lambda name: class_of(name, settings.segments))
    files = CaseFiles(out, state)
    with files.locked():
        return _Import(archive, files, StudyList(state), settings, on_event, deidentifier).run(plans)


@dataclass(eq=False)
class _Import:
    """Import into one folder, several studies at a time."""

    archive: Archive
    files: CaseFiles
    studies: StudyList
    settings: ImportSettings
    on_event: Callable[[dict[str, object]], object]
    deidentifier: Deidentifier | None

    def __post_init__(self) -> None:
        self.patience = Patience(answered=True)
        self.stopped = threading.Event()
        self.outcome = ImportOutcome()

    def run(self, plans: Sequence[StudyPlan]) -> ImportOutcome:
        settings, files, studies = self.settings, self.files, self.studies
        studies.settle(settings)
        finish_withdrawals(studies, files)
        for plan in plans:
            if plan.patient in studies.withdrawn:
                plan.problem = "the patient was withdrawn"
                files.remove(plan.case)
        for plan in plans:
            if plan.problem and plan.study is not None and settings.refresh:
                self._take_out(plan)
        sound = [plan for plan in plans if not plan.problem]
        imported = set() if settings.refresh else studies.studies.keys()
        todo = [plan for plan in sound if plan.case not in imported or not files.whole(plan.case, settings)]
        problems = self.outcome.problems
        problems.update({plan.case: plan.problem for plan in plans if plan.problem})
        objects = sum(plan.objects for plan in todo)
        self.on_event(
            {"event": "start", "todo": len(todo), "there": len(sound) - len(todo), "objects": objects}
        )
        with ThreadPoolExecutor(settings.parallel) as pool:
            futures = [(plan, pool.submit(self._import, plan)) for plan in todo]
            try:
                for plan, future in futures:
                    if problem := future.result():
                        problems[plan.case] = problem
            except BaseException:
                self.stopped.set()
                pool.shutdown(cancel_futures=True, wait=False)
                raise
        # Not after an interruption: a split of some patients would bind the others.
        files.write_listing(studies, settings)
        studies.save()
        return self.outcome

    def _take_out(self, plan: StudyPlan) -> None:
        if plan.case in self.studies.studies and self.files.whole(plan.case, self.settings):
            self.outcome.taken_out.append(plan.case)
        self.files.remove(plan.case)

    def _import(self, plan: StudyPlan) -> str:
        """Import one study, and return its problem; empty without one."""
        if self.stopped.is_set():
            return ""
        staging = self.files.staging(plan.case)
        private_folder(staging)
        self.studies.begin(plan)
        problem = ""
        try:
            with reading_objects():
                self._convert(plan, staging)
        except ReaderError as error:
            problem = str(error)
            self._take_out(plan)
            if isinstance(error, LabelRefused):
                self.studies.begin(plan, error.segments)
        except ArchiveError as error:
            # Its objects stay, and the next call requests the missing ones alone.
            self.on_event({"event": "failed", "case": plan.case})
            try:
                return self.patience.problem(error)
            except ArchiveError:
                self.stopped.set()
                raise
        self.patience.heard()
        shutil.rmtree(staging, ignore_errors=True)
        self.on_event({"event": "failed" if problem else "imported", "case": plan.case})
        return problem

    def _convert(self, plan: StudyPlan, staging: Path) -> None:
        settings = self.settings
        files = [self._fetch(series, staging / f"label{n}") for n, series in enumerate(plan.labels)]
        objects = [LabelObject.read(file) for fetched in files for file in fetched]
        references = set[str]().union(
            *(item.references for item in possible_outlines(objects, settings) or objects)
        )
        images = plan.images
        if len(images) > max(1, len(settings.channels)):
            images = [_referred(images, references)]
        files += [self._fetch(series, staging / f"image{n}") for n, series in enumerate(images)]
        rules: list[str | None] = [*settings.channels.values()] or [settings.series]
        volumes = [
            open_volume(
                staging / f"image{n}", rule, allow_burned_in=settings.allow_burned_in, volume=settings.volume
            )
            for n, rule in enumerate(rules)
        ]
        for remark in dict.fromkeys(text for volume in volumes for text in volume.remarks):
            self.on_event({"event": "remark", "case": plan.case, "text": remark})
        grid = volumes[0]
        label: np.ndarray | None = None
        shown: list[str] = []
        if settings.outlined:
            grid = next((volume for volume in volumes if volume.uid in references), grid)
            require(grid.uid in references, "none of its label maps refers to its image")
            label = _label_map(grid, objects, settings)
            shown = [settings.classes[number] for number in np.unique(label) if number]
        self._write(plan, volumes, grid, label, files)
        self.studies.enter(plan, images, [volume.first.units for volume in volumes], shown)

    def _write(
        self,
        plan: StudyPlan,
        volumes: Sequence[DicomSeries],
        grid: DicomSeries,
        label: np.ndarray | None,
        objects: Sequence[Sequence[Path]],
    ) -> None:
        """Write the files of a case; the same voxels give the same bytes."""
        files, case = self.files, plan.case
        images = load_on_grid(volumes, grid)
        for path, voxels in zip(files.images(case, self.settings.channels), images, strict=True):
            write_nifti(path, voxels, grid.stated_affine)
        if label is not None:
            write_nifti(files.label(case), label, grid.stated_affine)
        if self.deidentifier is not None:
            shutil.rmtree(files.dicom(case), ignore_errors=True)
            study = case.removeprefix("case-")
            with reading_objects("an object cannot be written without identity"):
                for fetched in objects:
                    self.deidentifier.write(fetched, files.dicom(case), patient=plan.patient, study=study)

    def _fetch(self, series: ArchiveSeries, folder: Path) -> list[Path]:
        return self.archive.fetch(series, folder, lambda: self.on_event({"event": "object"}))


def _referred(images: Sequence[ArchiveSeries], references: set[str]) -> ArchiveSeries:
    referred = [series for series in images if series.uid in references]
    require(
        len(referred) == 1,
        f"its label maps refer to {len(referred) or 'none'} of {len(images)} possible images; choose one "
        "with --series",
    )
    return referred[0]


def _label_map(grid: DicomSeries, objects: Sequence[LabelObject], settings: ImportSettings) -> np.ndarray:
    outlines = choose_outlines([item for item in objects if grid.uid in item.references], settings)
    label = LabelGrid(grid, settings)
    for outline in outlines:
        check_references(outline.source.dataset, grid)
        with reading_objects("a label object is damaged"):
            label.add(outline.source.dataset, outline.classes)
    return label.voxels
