"""Predict new images with a finished model: label maps on the images' grids, or classes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from monai.transforms import Compose
from torch import Tensor

from medfedaug._version import software_versions
from medfedaug.data.base import Case, SiteFolder
from medfedaug.data.io.formats import SERIES, files_of, is_dicom
from medfedaug.data.preparation.cache import keep_decoded
from medfedaug.data.unlabelled import Given, check_given, open_given
from medfedaug.data.volumes import VolumeFolder
from medfedaug.errors import ConfigError, DataError, MedFedAugError, StorageError, first_line
from medfedaug.federation.engine import check_device
from medfedaug.federation.job_folder import STATISTICS
from medfedaug.federation.site.model import SiteModel
from medfedaug.runs.finished_run import FinishedRun, Origin
from medfedaug.runs.folder import only_process
from medfedaug.runs.model_score import Annotated, ModelScore
from medfedaug.runs.prediction.case_writer import CaseWriter, SeriesObjects, series_objects
from medfedaug.runs.prediction.input_drift import DriftReference, image_measures
from medfedaug.runs.prediction.options import PredictionOptions
from medfedaug.runs.prediction.predictions_file import PREDICTIONS, Predictions, Promise
from medfedaug.statistics import save_statistics
from medfedaug.tasks import EvaluationCase, Prediction
from medfedaug.transforms import FedRDNd
from medfedaug.utils.printable import counted

Event = Callable[[dict[str, Any]], None]
"""Receives events, case by case."""

_ONE_CASE = 2**34  # bytes, enough to decode the files of a case only once


def predict_images(
    run: FinishedRun,
    images: str | Path,
    out: str | Path,
    options: PredictionOptions | None = None,
    *,
    further: Mapping[str, Mapping[str, str]] | None = None,
    on_event: Event | None = None,
    on_case: Callable[[str], object] | None = None,
    promise: Promise | None = None,
) -> Predictions:
    """Predict images, case by case, and record the outcome of each.

    A folder with finished cases is continued if model and options are the same.

    Args:
        images: a file or a folder, see `medfedaug.data.unlabelled.open_given`.
        out: the folder to write to: a label map for each case (``NAME`` with the suffix of its image),
            ``previews/NAME.png``, ``probabilities/NAME``, and ``predictions.json``.
        further: see `medfedaug.runs.prediction.case_writer.SeriesObjects`; by default they are read from
            the files.
        on_event: called with a small dictionary for each event that a user may want to see.
        on_case: called with the name of each case whose files are written.
        promise: a calibration to apply to the images that are like the calibrated ones.

    Returns:
        The content of ``predictions.json``; ``failed`` has the cases that could not be predicted.
    """
    images, out, options = Path(images), Path(out), options or PredictionOptions()
    origin = Origin.of(run, options.site, options.statistics)
    given = open_given(images, run.config, origin.site, leave_out=out, series=options.series)
    if images.is_dir() and out.exists() and out.resolve() == images.resolve():
        raise ConfigError(f"{out}: holds the images; choose another folder for the predictions")
    check_device(options.device)
    job = _Job(
        run=run,
        given=given,
        out=out,
        origin=origin,
        options=options,
        tell=on_event or (lambda event: None),
        objects=series_objects(
            run, origin, options, given.folder, further or {}, promise.sha256 if promise else ""
        ),
        on_case=on_case or (lambda case: None),
        promise=promise,
    )
    job.check_apart()
    with only_process(out):
        return job.carry_out()


def uses_given_images(run: FinishedRun, origin: Origin) -> bool:
    """Return whether the result depends on statistics of all images given, so that none may be damaged."""
    composition = run.composition
    return bool((composition.needs_statistics and origin.pair is None) or composition.kept_keys)


@dataclass(frozen=True, eq=False)
class Predictor:
    """The model of a run with its statistics and layers at the images' place."""

    run: FinishedRun
    origin: Origin
    model: SiteModel
    transform: Compose

    @classmethod
    def prepare(cls, run: FinishedRun, origin: Origin, folder: SiteFolder, device: str) -> Predictor:
        model = run.at_site(origin.site, folder, device, statistics=origin.pair)
        run.recall(model)
        return cls(run, origin, model, model.evaluation_transform())

    def statistics(self, count: int) -> dict[str, Any] | None:
        """Return the pair that normalises the images, and its source; ``None`` where no method normalises."""
        normalizer = next((t.normalizer for t in self.transform.transforms if isinstance(t, FedRDNd)), None)
        if normalizer is None or normalizer.pair is None:
            return None
        mean, std = (values.tolist() for values in normalizer.pair)
        statistics = {"mean": mean, "std": std, "intensity": self.run.composition.intensity}
        if normalizer.average:
            return {"of": "the average of the federation's sites", **statistics}
        if self.origin.pair is not None:
            return {"of": self.origin.source, **statistics}
        return {"of": f"the {counted(count, 'image')} given", **statistics, "file": STATISTICS}

    def predict(self, folder: SiteFolder, case: Case, *, probabilities: bool) -> Prediction:
        """Predict a case within `SiteModel.scoring`, in evaluation mode."""
        return self.predict_prepared(
            self.model.task.evaluation_case(folder, case, labelled=False), probabilities=probabilities
        )

    def predict_prepared(self, case: EvaluationCase, *, probabilities: bool) -> Prediction:
        """Predict a case of `medfedaug.tasks.Task.evaluation_case`, as `predict` does."""
        model = self.model
        size = model.config.batch_size
        return model.task.predict_case(model.network, case, self.transform, size, probabilities)

    def moments(self, folder: SiteFolder, case: Case) -> dict[str, Tensor]:
        """Return mean and standard deviation, (C,) each, of a case's prepared image."""
        composition, preparation = self.run.composition, self.model.task.preparation
        image = folder.prepared_image(case, composition.intensity, preparation)
        return preparation.moments(image, composition.statistics_over)


@dataclass(frozen=True, eq=False)
class _Job:
    """Cases, settings and destination of one call."""

    run: FinishedRun
    given: Given
    out: Path
    origin: Origin
    options: PredictionOptions
    tell: Event
    objects: SeriesObjects
    on_case: Callable[[str], object]
    promise: Promise | None

    @property
    def folder(self) -> SiteFolder:
        return self.given.folder

    @property
    def dense(self) -> bool:
        return self.run.config.task == "segmentation"

    @cached_property
    def writer(self) -> CaseWriter:
        return CaseWriter(
            self.out,
            self.folder,
            self.run.config.classes,
            self.options,
            objects=self.objects,
            borrowed=self.borrowed,
            promise=self.promise,
        )

    def carry_out(self) -> Predictions:
        run, cases = self.run, {case.name: case for case in self.folder.cases["test"]}
        earlier = Predictions.read(self.out)
        known = Predictions.files(earlier)
        planned = {name: self.writer.files(case) for name, case in cases.items()}
        statistics = [STATISTICS] if run.composition.needs_statistics and self.origin.pair is None else []
        for file in (*statistics, *(file for files in planned.values() for file in files)):
            if os.path.lexists(self.out / file) and file not in known:
                raise ConfigError(
                    f"{self.out / file} is not of an earlier prediction (predictions.json does not name it); "
                    "choose another folder, or move it away"
                )
        record = Predictions(self.out, self.inputs(), self.details())
        if self.given.left_out:
            self.tell({"event": "left_out", "left_out": record.details["left_out"]})
        states = {name: _state(case) for name, case in cases.items()}
        if self.options.overwrite:
            record.delete((*known, PREDICTIONS))
        else:
            record.resume(earlier, states)
        good = self.readable(record, cases)
        todo = [name for name in good if name not in record.cases]
        record.pending = {name: planned[name] for name in todo}
        self.tell({"event": "start", "cases": len(cases), "there": len(good) - len(todo), "todo": len(todo)})
        if not todo:
            record.write()
            return record
        folder = replace(self.folder, cases={**self.folder.cases, "test": tuple(good.values())})
        predictor = Predictor.prepare(run, self.origin, folder, self.options.device)
        reference = DriftReference.of(run)
        used = predictor.statistics(len(good))
        record.agree("statistics", used)
        if self.promise and self.promise.differs(used):
            raise ConfigError(
                "the calibration normalised its images with other statistics: give the same --statistics FILE"
            )
        if used and "file" in used:
            pair = {"images": predictor.model.statistics(reference.over)}
            save_statistics(self.out / STATISTICS, pair, run.composition.intensity)
        record.details["notes"] = self.notes(reference, used)
        record.details["compared_with_the_sites"] = reference.sources
        try:
            record.write()
            with predictor.model.scoring():
                predictor.model.network.eval()
                for name in todo:
                    self.predict(record, good[name], states[name], predictor, reference)
        finally:
            record.write()  # also when somebody stops it
        return record

    def check_apart(self) -> None:
        """Refuse two cases with the same name or file."""
        owners: dict[str, Case] = {}
        for case in self.folder.cases["test"]:
            for place in (case.name, *self.writer.files(case)):
                other = owners.setdefault(place, case)
                if other is not case:
                    raise ConfigError(
                        f"{case.image} and {other.image} would both be predicted as {place}: rename one "
                        "of them, or predict one at a time"
                    )

    def inputs(self) -> dict[str, Any]:
        """Model and options, which determine the result together with the statistics."""
        options = {
            "site": self.origin.site or None,
            "probabilities": self.options.probabilities,
            "previews": self.options.previews,
            **({"series": self.options.series} if self.options.series is not None else {}),
            **({"calibration": self.promise.sha256} if self.promise else {}),
            **self.objects.settings(),
        }
        run = self.run
        model = {"sha256": run.sha256, "run": run.record["run"], "round": run.round}
        return {"model": model, "options": options}

    def details(self) -> dict[str, Any]:
        config = self.run.config
        return {
            "task": config.task,
            "classes": list(config.classes),
            "network": config.network,
            "methods": [method["name"] for method in config.methods],
            "test": asdict(ModelScore.of(self.run.record, self.origin.site)),
            **({"borrowed": self.borrowed} if self.borrowed else {}),
            **({"promises": dict(self.promise.sentences)} if self.promise else {}),
            "folder": os.path.abspath(self.run.model.parent),
            "versions": software_versions(),
            "images": os.path.abspath(self.folder.path),
            "left_out": [
                {"path": os.path.relpath(path, self.root), "reason": reason}
                for path, reason in self.given.left_out
            ],
        }

    @property
    def root(self) -> Path:
        """The folder to which paths are relative."""
        return self.folder.path if self.folder.path.is_dir() else self.folder.path.parent

    def readable(self, record: Predictions, cases: dict[str, Case]) -> dict[str, Case]:
        """Return the cases that can be read and that the model takes; record the others as failed."""
        scaling = str(self.run.record.get("input", {}).get("scaling", ""))
        photographs = {"fixed": True, "each volume": False}.get(scaling) if self.dense else True
        decoded = uses_given_images(self.run, self.origin) and not cases.keys() <= record.cases.keys()
        task = self.run.composition.task()
        good: dict[str, Case] = {}
        for number, (name, case) in enumerate(cases.items()):
            try:
                if name in self.given.unclear:
                    raise DataError(self.given.unclear[name], path=case.image)
                check_given(self.folder, case, self.run.config, photographs)
                if decoded:
                    self.tell({"event": "reading", "case": name, "number": number, "of": len(cases)})
                    task.evaluation_case(self.folder, case, labelled=False)
            except DataError as error:
                self.failed(record, case, error)
            else:
                good[name] = case
        if self.dense:
            self.objects.check(good.values())
        return good

    @property
    def borrowed(self) -> dict[str, str]:
        """Notes on the classes that the images' site has not outlined; empty without a site."""
        site, annotated = self.origin.site, Annotated.of(self.run.record)
        texts, pairs = annotated.sentences(site) if site else {}, self.run.statistics
        return {name: f"{text}{annotated.distance(site, name, pairs)}" for name, text in texts.items()}

    def notes(self, reference: DriftReference, used: dict[str, Any] | None) -> list[str]:
        """Return the notes that hold for all cases."""
        composition, notes = self.run.composition, []
        if composition.epochs_before_test:
            notes.append(
                "each site trained the model further by itself before it was tested; this is the model "
                "before that"
            )
        if composition.personal and self.origin.site:
            notes.append(f"the layers or weights of site {self.origin.site} are used")
        elif composition.kept_keys:
            notes.append("the run's layers for unseen sites replace the layers that each site keeps")
        elif composition.personal:
            notes.append("this is the global model; each site has a personal one, which --site NAME uses")
        elif self.origin.site and not composition.needs_statistics:
            notes.append("the model is the same for every site: --site changes nothing")
        if used and "file" in used:
            notes.append(
                f"images are normalised with the statistics of {used['of']}, which are in {STATISTICS}: "
                f"with --statistics {self.out / STATISTICS} later images are normalised alike"
            )
        # Photographs have no voxels in millimetres.
        sizes = isinstance(self.folder, VolumeFolder) and not self.folder.has_photographs
        compared = ("intensity", "spacing") if sizes else ("intensity",)
        if missing := [kind for kind in compared if kind not in reference.sources]:
            notes.append(
                f"the run recorded nothing of its sites' {' and '.join(missing)}, which cannot be compared: "
                "an unusual image is not noticed"
            )
        notes += [*self.borrowed.values(), *(self.promise.notes if self.promise else ())]
        for text in notes:
            self.tell({"event": "note", "text": text})
        return notes

    def predict(
        self,
        record: Predictions,
        case: Case,
        state: Sequence[Any],
        predictor: Predictor,
        reference: DriftReference,
    ) -> None:
        """Predict a case and write its files, or record its failure."""
        self.tell({"event": "case", "case": case.name})
        try:
            with keep_decoded(_ONE_CASE):
                unlike = self.unlike(case, predictor, reference)
                outside = self.unlike(case, predictor, self.promise.ranges) if self.promise else []
                shares = self.options.probabilities or not self.dense or self.promise is not None
                prediction = predictor.predict(self.folder, case, probabilities=shares)
                entry = self.writer.write(case, prediction, promised=not outside)
                entry |= {"warnings": unlike, "image": self.measures(case)}
                entry |= {"no_promise": outside} if outside else {}
        except StorageError:  # every further case would fail alike
            raise
        except (MedFedAugError, RuntimeError, ValueError, MemoryError) as error:
            self.failed(record, case, error)
            return
        files = [os.path.relpath(file, self.root) for file in case.files]
        remarks = [text for file in case.files if is_dicom(file) for text in SERIES.remarks(file)]
        entry |= {"remarks": remarks} if remarks else {}
        written = [file for file in self.writer.files(case) if (self.out / file).exists()]
        record.finished(case.name, {"files": files, **entry, "written": written, "state": state})
        for event, texts in (("remark", remarks), ("unlike", unlike), ("no_promise", outside)):
            for text in texts:
                self.tell({"event": event, "case": case.name, "text": text})
        self.on_case(case.name)
        self.tell({"event": "predicted", "case": case.name})

    def unlike(self, case: Case, predictor: Predictor, reference: DriftReference) -> list[str]:
        warnings = []
        if "intensity" in reference.sources:
            moments = predictor.moments(self.folder, case)
            warnings += reference.intensity_warnings(moments, self.run.config.channel_names)
        if isinstance(self.folder, VolumeFolder):
            warnings += reference.spacing_warnings(self.folder.affine(case))
        return warnings

    def measures(self, case: Case) -> dict[str, float]:
        image = self.folder.load_image(case, self.run.composition.intensity)
        affine = self.folder.affine(case) if isinstance(self.folder, VolumeFolder) else None
        return image_measures(image, affine, self.run.config.channel_names)

    def failed(self, record: Predictions, case: Case, error: Exception) -> None:
        text = str(error) if isinstance(error, MedFedAugError) else f"{case.image}: {first_line(error)}"
        record.failure(case, text, self.writer.files(case))
        self.tell({"event": "failed", "case": case.name, "reason": text})


def _state(case: Case) -> list[list[int]]:
    """Return sizes and times of a case's files, which differ for a new version."""
    states = [[file.stat() for file in files_of(path) if file.is_file()] for path in case.files]
    return [[sum(s.st_size for s in part), max((s.st_mtime_ns for s in part), default=0)] for part in states]


def load_run(folder: str | Path, *, state: str | Path | None = None) -> LoadedRun:
    """Open a finished run, to look at its results and to use its model (`FinishedRun.open`).

    Example:
        In a notebook::

            import medfedaug as mfa

            run = mfa.load_run("runs/fedrdn")
            run.test_table()  # a row for each site; pandas.DataFrame takes it
            run.predict("new/patient.nii.gz", "predicted", site="site_A")
            network = run.network()
    """
    return LoadedRun.open(folder, state=state)


class LoadedRun(FinishedRun):
    """A `FinishedRun` that predicts."""

    def predict(self, images: str | Path, out: str | Path, **options: Any) -> Predictions:
        """Predict images, and write label maps or classes.

        Args:
            images: a file or a folder.
            out: the folder to write to.
            **options: fields of `medfedaug.runs.prediction.options.PredictionOptions`, ``site`` among them.

        Returns:
            The content of ``predictions.json``.
        """
        return predict_images(self, images, out, PredictionOptions(**options))
