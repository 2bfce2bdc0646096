"""A finished model on new images: label maps on the images' own grids, or classes, without any label."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from medfedaug.data.base import Case, SiteFolder
from medfedaug.data.io.dicom_identity import ModelIdentity
from medfedaug.data.io.dicom_segmentation import check_highdicom
from medfedaug.data.io.dicom_series import open_series
from medfedaug.data.io.formats import files_of, is_dicom
from medfedaug.data.io.segment_codes import SegmentCodes
from medfedaug.data.preparation.decoded_cache import keep_decoded
from medfedaug.data.unlabelled import Given, check_given, open_given
from medfedaug.data.volumes import VolumeFolder
from medfedaug.errors import ConfigError, DataError, MedFedAugError, StorageError, first_line
from medfedaug.federation.job_folder import STATISTICS
from medfedaug.runs.annotated import Annotated
from medfedaug.runs.finished_run import FinishedRun
from medfedaug.runs.folder import only_process
from medfedaug.runs.input_statistics import Origin
from medfedaug.runs.prediction.case_writer import CaseWriter, object_kinds
from medfedaug.runs.prediction.ensemble import Ensemble, mean_prediction
from medfedaug.runs.prediction.input_drift import Familiar
from medfedaug.runs.prediction.object_identity import further_series, object_identity, read_codes
from medfedaug.runs.prediction.options import PredictionOptions
from medfedaug.runs.prediction.pass_agreement import PassAgreement
from medfedaug.runs.prediction.predictions_file import Predictions
from medfedaug.runs.prediction.predictor import Predictor, predictions
from medfedaug.runs.prediction.training_range import TrainingRange
from medfedaug.statistics import save_statistics
from medfedaug.utils.versions import software_versions

__all__ = ["Event", "predict_images", "uses_given_images"]

Event = Callable[[dict[str, Any]], None]
"""Receives events, case by case."""

_ONE_CASE = 2**34  # bytes: the files of a case are decoded once, whoever asks for them


def predict_images(
    models: Ensemble,
    images: str | Path,
    out: str | Path,
    options: PredictionOptions | None = None,
    *,
    again: str = "",
    further: Mapping[str, Mapping[str, str]] | None = None,
    among: Collection[str] = (),
    on_event: Event | None = None,
    on_case: Callable[[str], object] | None = None,
) -> Predictions:
    """Predict images, case by case, and write down what became of each.

    A folder that holds finished cases is continued, if model and options are the same.

    Args:
        models: the run whose model predicts, or several, whose probabilities are averaged.
        images: a file or a folder, see `medfedaug.data.unlabelled.open_given`.
        out: the folder to write to: a label map for each case (``NAME`` with the suffix of its image),
            ``previews/NAME.png``, ``probabilities/NAME``, and ``predictions.json``.
        options: settings; ``None`` for the defaults.
        again: of `medfedaug.data.io.dicom_identity.ModelIdentity`.
        further: SeriesInstanceUIDs of the series besides the first one of which the images are, by case and
            channel; by default those of the DICOM series that are given.
        among: names of all cases of a task that is predicted in parts; those of other parts that could not be
            predicted stay in the record.
        on_event: called with a small dictionary for everything that a user may want to see.
        on_case: called with the name of each case whose files are written.

    Returns:
        What is in ``predictions.json``; cases that could not be predicted are under ``failed``.

    Raises:
        MedFedAugError: one line that says what is wrong and where, before anything is predicted;
            `StorageError` also later.
    """
    images, out, options = Path(images), Path(out), options or PredictionOptions()
    origins = tuple(Origin.of(run, options.site, options.statistics) for run in models.runs)
    given = open_given(images, models.first.config, origins[0].site, leave_out=out, series=options.series)
    if images.is_dir() and out.exists() and out.resolve() == images.resolve():
        raise ConfigError(f"{out}: holds the images; choose another folder for what is predicted")
    _check_device(options.device)
    _check_passes(models, options)
    job = _Job(
        models=models,
        given=given,
        out=out,
        origins=origins,
        options=options,
        tell=on_event or (lambda event: None),
        codes=read_codes(models.first, options.codes),
        again=again,
        further=further or {},
        on_case=on_case or (lambda case: None),
    )
    job.check_apart()
    with only_process(out):
        return job.carry_out(among)


def uses_given_images(run: FinishedRun, origin: Origin) -> bool:
    """Return whether statistics of the images given decide over the result: none of them may be damaged."""
    composition = run.composition
    return bool((composition.needs_statistics and origin.pair is None) or composition.kept_keys)


def _check_passes(models: Ensemble, options: PredictionOptions) -> None:
    flips, uncertainty_map = options.flips, options.uncertainty_map
    dense = models.first.config.task == "segmentation"
    for option, given in (
        ("--flips", flips),
        ("--uncertainty-map", uncertainty_map),
        ("--data", options.data is not None),
    ):
        if given and not dense:
            raise ConfigError(f"{option}: the run classifies, and this is for label maps; leave it out")
    if flips and not models.first.composition.task().mirrored:
        raise ConfigError(
            "--flips: classes of the run name a side, left or right, and its plan has no orientation that "
            "says which axis must not be flipped; leave it out"
        )
    if uncertainty_map and not flips and len(models.runs) == 1:
        raise ConfigError("--uncertainty-map needs several passes: give --flips, or several runs to --model")


def _check_device(device: str) -> None:
    try:
        if torch.empty(0, device="cpu" if device == "auto" else device).is_meta:
            raise RuntimeError("it computes nothing")
    except (RuntimeError, AssertionError) as error:  # an AssertionError where PyTorch has no CUDA at all
        raise ConfigError(f"--device {device}: {first_line(error)}") from error


@dataclass(frozen=True, eq=False)
class _Job:
    """One call: cases, where they go, and what is done with them."""

    models: Ensemble
    given: Given
    out: Path
    origins: tuple[Origin, ...]
    options: PredictionOptions
    tell: Event
    codes: Mapping[str, SegmentCodes]
    again: str
    further: Mapping[str, Mapping[str, str]]
    on_case: Callable[[str], object]

    @property
    def run(self) -> FinishedRun:
        """A run, for what is the same in all of an ensemble."""
        return self.models.first

    @property
    def origin(self) -> Origin:
        """The origin of the images; the pair of a site may be another one in each run."""
        return self.origins[0]

    @property
    def folder(self) -> SiteFolder:
        return self.given.folder

    @property
    def dense(self) -> bool:
        return self.run.config.task == "segmentation"

    @cached_property
    def writer(self) -> CaseWriter:
        """The writer of the files of each case."""
        return CaseWriter(
            self.out,
            self.folder,
            self.run.config.classes,
            self.options,
            identity=self.identity,
            codes=self.codes,
            borrowed=self.borrowed,
        )

    def carry_out(self, among: Collection[str]) -> Predictions:
        run, cases = self.run, {case.name: case for case in self.folder.cases["test"]}
        earlier = Predictions.read(self.out)
        known, planned = (
            Predictions.files(earlier),
            {name: self.writer.files(case) for name, case in cases.items()},
        )
        own = [STATISTICS] if run.composition.needs_statistics and self.origin.pair is None else []
        for file in (*own, *(file for files in planned.values() for file in files)):
            if os.path.lexists(self.out / file) and file not in known:
                raise ConfigError(
                    f"{self.out / file} is not of an earlier prediction (predictions.json does not name it); "
                    "choose another folder, or move it away"
                )
        found = Predictions(self.out, self.made(), self.told())
        if self.given.left_out:
            self.tell({"event": "left_out", "left_out": found.told["left_out"]})
        states = {name: _state(case) for name, case in cases.items()}
        if self.options.overwrite:
            found.remove(known)
        else:
            found.resume(earlier, states, among)
        good = self.readable(found, cases)
        todo = [name for name in good if name not in found.cases]
        if todo and uses_given_images(run, self.origin):
            self.drop_damaged(found, good)
            todo = [name for name in todo if name in good]
        found.pending = {name: planned[name] for name in todo}
        self.tell({"event": "start", "cases": len(cases), "there": len(good) - len(todo), "todo": len(todo)})
        if todo:
            predictors = self.prepare(good)
            familiar = Familiar.of(self.models.runs)
            usual = self.training_range(found)
            used = _together([predictor.statistics(len(good)) for predictor in predictors])
            found.agree("statistics", used)
            if used and "file" in used:
                pair = {"images": predictors[0].model.statistics(familiar.over)}
                save_statistics(self.out / STATISTICS, pair, run.composition.intensity)
            found.told["notes"] = self.notes(familiar, used, usual)
            found.told["compared_with_the_sites"] = familiar.sources
            found.told |= {} if usual is None else {"training_range": usual.record()}
            try:
                found.write()
                with ExitStack() as contexts:
                    for predictor in predictors:
                        contexts.enter_context(predictor.model.scoring())
                        predictor.model.network.eval()
                    for name in todo:
                        self.predict(found, good[name], states[name], predictors, familiar, usual)
            finally:
                found.write()  # also when somebody stops it
        else:
            found.write()
        return found

    def check_apart(self) -> None:
        """Check that no two cases have one name, or would be written to one file.

        Raises:
            ConfigError: naming both.
        """
        whose: dict[str, Case] = {}
        for case in self.folder.cases["test"]:
            for place in (case.name, *self.writer.files(case)):
                other = whose.setdefault(place, case)
                if other is not case:
                    raise ConfigError(
                        f"{case.image} and {other.image} would both be predicted as {place}: rename one of "
                        "them, or predict it apart"
                    )

    def made(self) -> dict[str, Any]:
        """Settings that change the result, except for the statistics, which are not known yet."""
        options = {
            "site": self.origin.site or None,
            "probabilities": self.options.probabilities,
            "previews": self.options.previews,
            **({"series": self.options.series} if self.options.series is not None else {}),
            **({"codes": {name: asdict(codes) for name, codes in self.codes.items()}} if self.codes else {}),
            **({"objects": [kind.word for kind in kinds]} if (kinds := object_kinds(self.options)) else {}),
            **({"flips": True} if self.options.flips else {}),
            **({"uncertainty_map": True} if self.options.uncertainty_map else {}),
            **({"data": os.path.abspath(self.options.data)} if self.options.data is not None else {}),
        }
        return {"model": self.models.identity(), "options": options}

    def told(self) -> dict[str, Any]:
        config = self.run.config
        return {
            "task": config.task,
            "classes": list(config.classes),
            "network": config.network,
            "methods": [method["name"] for method in config.methods],
            "test": self.models.score(self.origin.site).record(),
            **({"borrowed": self.borrowed} if self.borrowed else {}),
            "models": [os.path.abspath(run.model.parent) for run in self.models.runs],
            "versions": software_versions(),
            "images": os.path.abspath(self.folder.path),
            "left_out": [
                {"path": os.path.relpath(path, self.root), "reason": reason}
                for path, reason in self.given.left_out
            ],
        }

    @property
    def root(self) -> Path:
        """The folder that paths are given in."""
        return self.folder.path if self.folder.path.is_dir() else self.folder.path.parent

    def readable(self, found: Predictions, cases: dict[str, Case]) -> dict[str, Case]:
        """The cases that can be read and are such as the model takes; the others have failed."""
        scaling = str(self.run.record.get("input", {}).get("scaling", ""))
        photographs = {"fixed": True, "each volume": False}.get(scaling) if self.dense else True
        good: dict[str, Case] = {}
        for name, case in cases.items():
            try:
                if name in self.given.unclear:
                    raise DataError(self.given.unclear[name], path=case.image)
                check_given(self.folder, case, self.run.config, photographs)
            except DataError as error:
                self.failed(found, case, error)
            else:
                good[name] = case
        if self.dense and any(is_dicom(case.image) for case in good.values()):
            check_highdicom()
        return good

    def drop_damaged(self, found: Predictions, good: dict[str, Case]) -> None:
        """Decode all cases; those that cannot be have failed and leave ``good``."""
        task = self.run.composition.task()
        for number, (name, case) in enumerate(list(good.items())):
            self.tell({"event": "reading", "case": name, "number": number, "of": len(good)})
            try:
                task.evaluation_case(self.folder, case, labelled=False)
            except DataError as error:
                self.failed(found, case, error)
                del good[name]

    def training_range(self, found: Predictions) -> TrainingRange | None:
        """Sizes and numbers of pieces in the site's training cases, where it gave them.

        All cases of a folder are compared with the same ones.
        """
        if self.options.data is None:
            return None
        if "training_range" in found.told:
            return TrainingRange.of_record(found.told["training_range"])
        return TrainingRange.of_site(self.options.data, self.origin.site, self.run, self.tell)

    def passes(self) -> PassAgreement | None:
        """A collector of the passes of a case; ``None`` where there is one alone."""
        if not self.dense or not (self.options.flips or len(self.models.runs) > 1):
            return None
        return PassAgreement(self.run.config.num_classes, mapped=self.options.uncertainty_map)

    def prepare(self, good: dict[str, Case]) -> list[Predictor]:
        """The models at the place of the images; all normalise with one pair, where it is of the images.

        Raises:
            ConfigError: where something is not there, with what to give.
        """
        folder = replace(self.folder, cases={**self.folder.cases, "test": tuple(good.values())})
        found: list[Predictor] = []
        for run, origin in zip(self.models.runs, self.origins, strict=True):
            composition = run.composition
            shared = composition.needs_statistics and origin.pair is None and found
            pair = found[0].model.statistics(composition.statistics_over) if shared else None
            found.append(Predictor.prepare(run, origin, folder, self.options.device, pair))
            if len(self.models.runs) > 1:
                found[-1].rest()
        return found

    @property
    def borrowed(self) -> dict[str, str]:
        """Notes on the classes that the images' site has not outlined; empty where no site is named."""
        site = self.origin.site
        return Annotated.of(self.run.record).sentences(site) if site else {}

    def notes(
        self, familiar: Familiar, used: dict[str, Any] | None, usual: TrainingRange | None
    ) -> list[str]:
        """Return the notes that hold for all cases."""
        composition, told = self.run.composition, []
        if (count := len(self.models.runs)) > 1:
            told.append(f"the probabilities of {count} models are averaged")
        if composition.epochs_before_test:
            told.append(
                "each site trained the model further by itself before it was tested; this is the model "
                "before that"
            )
        if composition.personal and self.origin.site:
            told.append(f"the layers or weights are those that site {self.origin.site} keeps")
        elif composition.kept_keys:
            told.append("the layers that each site keeps are replaced by what the run offers to unseen sites")
        elif composition.personal:
            told.append("this is the global model; each site has one of its own, which --site NAME uses")
        elif self.origin.site and not composition.needs_statistics:
            told.append("the model is the same for every site: --site changes nothing")
        if used and "file" in used:
            told.append(
                f"images are normalised with the statistics of {used['of']}, which are in {STATISTICS}: "
                f"with --statistics {self.out / STATISTICS} later images are normalised alike"
            )
        # Photographs have no voxels in millimetres.
        sizes = isinstance(self.folder, VolumeFolder) and not self.folder.has_photographs
        compared = ("intensity", "spacing") if sizes else ("intensity",)
        missing = [what for what in compared if what not in familiar.sources]
        if missing:
            told.append(
                f"the run recorded nothing of its sites' {' and '.join(missing)}, which cannot be compared: "
                "that an image is unlike theirs is not noticed"
            )
        told += self.borrowed.values()
        if usual is not None and usual.unknown:
            told.append(
                f"no training case of this site shows {', '.join(usual.unknown)} in full: no size of it is "
                "unusual here, and those of other sites are of their scanners"
            )
        for text in told:
            self.tell({"event": "note", "text": text})
        return told

    def predict(
        self,
        found: Predictions,
        case: Case,
        state: Sequence[Any],
        predictors: Sequence[Predictor],
        familiar: Familiar,
        usual: TrainingRange | None,
    ) -> None:
        """Predict a case and write all of it, or say why it could not be done."""
        self.tell({"event": "case", "case": case.name})
        try:
            with keep_decoded(_ONE_CASE):
                told = self.unlike(case, predictors[0], familiar)
                wanted = (
                    self.options.probabilities
                    or self.options.uncertainty_map
                    or not self.dense
                    or len(predictors) > 1
                )
                passes = self.passes()
                alone = predictions(
                    predictors,
                    self.folder,
                    case,
                    probabilities=wanted,
                    flips=self.options.flips,
                    passes=passes,
                )
                entry = self.writer.write(case, mean_prediction(alone), passes)
                unusual = [] if usual is None else usual.warnings(entry)
                entry["warnings"] = [*told, *unusual]
        except StorageError:  # it would be the same for the next one
            raise
        except (MedFedAugError, RuntimeError, ValueError, MemoryError) as error:
            self.failed(found, case, error)
            return
        files = [os.path.relpath(file, self.root) for file in case.files]
        remarks = [text for file in case.files if is_dicom(file) for text in open_series(file).remarks]
        entry |= {"remarks": remarks} if remarks else {}
        found.finished(
            case.name, {"files": files, **entry, "written": self.writer.files(case), "state": state}
        )
        for text in remarks:
            self.tell({"event": "remark", "case": case.name, "text": text})
        for text in told:
            self.tell({"event": "unlike", "case": case.name, "text": text})
        for text in unusual:
            self.tell({"event": "unusual", "case": case.name, "text": text})
        self.on_case(case.name)
        self.tell({"event": "predicted", "case": case.name})

    def unlike(self, case: Case, predictor: Predictor, familiar: Familiar) -> list[str]:
        told = []
        if "intensity" in familiar.sources:
            preparation = predictor.model.task.preparation
            image = self.folder.prepared_image(case, self.run.composition.intensity, preparation)
            moments = preparation.moments(image, familiar.over)
            told += familiar.intensity_warnings(moments, self.run.config.channel_names)
        if isinstance(self.folder, VolumeFolder):
            told += familiar.spacing_warnings(self.folder.affine(case))
        return told

    def identity(self, case: Case) -> ModelIdentity:
        """The maker of the DICOM objects of a case."""
        further = self.further.get(case.name) or further_series(case, self.folder.channel_names)
        return object_identity(
            self.models, self.origin, self.codes, self.again, flips=self.options.flips, further=further
        )

    def failed(self, found: Predictions, case: Case, error: Exception) -> None:
        text = str(error) if isinstance(error, MedFedAugError) else f"{case.image}: {first_line(error)}"
        found.failure(case, text, self.writer.files(case))
        self.tell({"event": "failed", "case": case.name, "reason": text})


def _together(used: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
    """The statistics of all models; where a site's pair is another one in each run, that of each."""
    first = used[0]
    if first is None or all(one == first for one in used):
        return first
    members = [{"mean": one["mean"], "std": one["std"]} for one in used if one is not None]
    return {"of": first["of"], "intensity": first["intensity"], "members": members}


def _state(case: Case) -> list[list[int]]:
    """Sizes and times of a case's files, by which another version of them is known."""
    found = []
    for path in case.files:
        states = [file.stat() for file in files_of(path) if file.is_file()]
        found.append([sum(s.st_size for s in states), max((s.st_mtime_ns for s in states), default=0)])
    return found
