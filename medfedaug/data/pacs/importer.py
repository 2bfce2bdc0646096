"""`import_studies`: studies of an archive as a site's data folder, under pseudonyms."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING

import pydicom

from medfedaug.data.pacs.archive import Archive, ArchiveError, FetchError, FoundSeries, require_pacs
from medfedaug.data.pacs.case_files import CaseFiles
from medfedaug.data.pacs.choice import ImportSettings, Planned
from medfedaug.data.pacs.label_grid import LabelGrid, class_of, referenced_series
from medfedaug.data.pacs.object_check import check_references, reading_objects
from medfedaug.data.pacs.patience import Patience
from medfedaug.data.pacs.study_list import StudyList
from medfedaug.data.pacs.volume import load_on_grid, open_volume, write_nifti
from medfedaug.data.pacs.withdrawal import finish_withdrawals
from medfedaug.errors import ConfigError, ReaderError, StorageError
from medfedaug.utils.files import private_folder

if TYPE_CHECKING:
    from medfedaug.data.pacs.deidentify import Deidentifier

__all__ = ["import_studies"]

_LARGE = "64 KB"  # values that are read when they are needed: pixels


def import_studies(
    archive: Archive,
    plans: Sequence[Planned],
    out: Path,
    state: Path,
    settings: ImportSettings,
    on_event: Callable[[dict[str, object]], object] = lambda event: None,
    *,
    new_uid: Callable[[str], str] | None = None,
) -> dict[str, str]:
    """Fetch and convert the studies of a plan; those that are there already are kept.

    Args:
        archive: the archive.
        plans: of `plan_import`.
        out: the site's data folder.
        state: folder of what is the site's own: its list, and objects that are being fetched.
        settings: the choices.
        on_event: called from several threads with ``start`` (``todo``, ``there``, ``objects``), ``object``
            for each that came, ``remark`` (``case``, ``text``), ``imported`` and ``failed`` (``case``).
        new_uid: with ``settings.anonymise``, the UID in place of another one, with the site's key.

    Returns:
        Problems by case.

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
        return _Import(archive, files, StudyList(state), settings, on_event, deidentifier).run(plans)


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

    def run(self, plans: Sequence[Planned]) -> dict[str, str]:
        """Import the studies, and return the problems by case."""
        settings, files, studies = self._settings, self._files, self._studies
        studies.settle(settings)
        files.remove_unfinished()
        finish_withdrawals(studies, files)
        for plan in plans:
            if plan.patient in studies.withdrawn:
                plan.problem = "the patient was withdrawn"
                files.remove(plan.case)
        sound = [plan for plan in plans if not plan.problem]
        todo = [
            plan for plan in sound if plan.case not in studies.studies or not files.whole(plan.case, settings)
        ]
        failed = {plan.case: plan.problem for plan in plans if plan.problem}
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
        return failed

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
        settings, files = self._settings, self._files
        coming = [self._fetch(one, staging / f"label{n}") for n, one in enumerate(plan.labels)]
        images, objects = plan.images, None
        if len(images) > max(1, len(settings.channels)):
            objects = _label_objects(_came(coming))
            images = [_referred(images, objects)]
        coming += [self._fetch(one, staging / f"image{n}") for n, one in enumerate(images)]
        found = _came(coming)[: len(plan.labels)]
        rules: list[str | None] = [*settings.channels.values()] or [settings.series]
        volumes = [
            open_volume(staging / f"image{n}", rule, allow_burned_in=settings.allow_burned_in)
            for n, rule in enumerate(rules)
        ]
        for remark in dict.fromkeys(text for one in volumes for text in one.remarks):
            self._on_event({"event": "remark", "case": plan.case, "text": remark})
        grid, label = volumes[0], None
        if settings.labelled:
            objects = objects if objects is not None else _label_objects(found)
            named = set().union(*(referenced_series(one) for one in objects))
            grid = next((one for one in volumes if one.uid in named), grid)
            label = LabelGrid(grid, settings.segments, settings.classes, overlap=settings.overlap)
            if grid.uid not in named:
                raise ReaderError("none of its label maps refers to its image")
            for one in objects:
                if grid.uid in referenced_series(one):
                    check_references(one, grid)
                    _add(label, one, settings.threshold)
            if not label.used:
                raise ReaderError("none of its segments has a name that --segments gives")
        assert grid.affine is not None
        for path, voxels in zip(
            files.images(plan.case, settings.channels), load_on_grid(volumes, grid), strict=True
        ):
            write_nifti(path, voxels, grid.affine)
        if label is not None:
            write_nifti(files.label(plan.case), label.voxels, grid.affine)
        if self._deidentifier is not None:
            _keep_objects(self._deidentifier, _came(coming), files.dicom(plan.case), plan)
        self._studies.enter(plan, [one.uid for one in images])

    def _fetch(self, series: FoundSeries, folder: Path) -> Future[list[Path]]:
        arrived = {"event": "object"}
        return self._fetching.submit(self._archive.fetch, series, folder, lambda: self._on_event({**arrived}))


def _keep_objects(
    deidentifier: Deidentifier, series: Sequence[Sequence[Path]], folder: Path, plan: Planned
) -> None:
    """Write the objects of a case without identity; a file's name is its new UID."""
    shutil.rmtree(folder, ignore_errors=True)
    try:
        for files in series:
            deidentifier.write(files, folder, patient=plan.patient, study=plan.case.removeprefix("case-"))
    except (StorageError, ReaderError):
        raise
    except Exception as error:  # a damaged object fails anywhere in pydicom
        raise ReaderError("an object cannot be written without identity") from error


def _came(coming: Sequence[Future[list[Path]]]) -> list[list[Path]]:
    """The files of several series, once all have come or failed: half a study is kept, too."""
    wait(coming)
    return [future.result() for future in coming]


def _label_objects(series: Sequence[Sequence[Path]]) -> list[pydicom.Dataset]:
    """Open label objects; their pixels are read when they are needed."""
    try:
        return [pydicom.dcmread(file, defer_size=_LARGE) for files in series for file in files]
    except Exception as error:  # a damaged object fails anywhere in pydicom
        raise ReaderError("a label object is damaged") from error


def _referred(images: Sequence[FoundSeries], objects: Sequence[pydicom.Dataset]) -> FoundSeries:
    named = set().union(*(referenced_series(one) for one in objects))
    found = [one for one in images if one.uid in named]
    if len(found) != 1:
        what = "none" if not found else f"{len(found)}"
        raise ReaderError(
            f"its label maps refer to {what} of {len(images)} possible images; choose one with --series"
        )
    return found[0]


def _add(grid: LabelGrid, dataset: pydicom.Dataset, threshold: float) -> None:
    try:
        grid.add(dataset, threshold)
    except ReaderError:
        raise
    except Exception as error:  # a damaged object fails anywhere in pydicom
        raise ReaderError("a label object is damaged") from error
