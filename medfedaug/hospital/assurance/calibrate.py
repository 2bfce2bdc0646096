"""Calibrate a finished model on a site's own cases: a threshold for each structure, with its promise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from medfedaug.data.base import Case
from medfedaug.data.checks import check_copies
from medfedaug.data.preparation.cache import keep_decoded
from medfedaug.data.volumes import VolumeFolder
from medfedaug.errors import ConfigError, warn
from medfedaug.federation.planning.fingerprint import edges_in_ras
from medfedaug.federation.site.data_folder import open_own_data
from medfedaug.hospital.assurance.calibration import KIND, VERSION
from medfedaug.hospital.assurance.options import CLASSES, CalibrationOptions
from medfedaug.hospital.assurance.risk_control import (
    LEVELS,
    Curve,
    class_curve,
    controlled_level,
    fewest,
    structure_curve,
)
from medfedaug.runs.evaluate import sites_of
from medfedaug.runs.finished_run import FinishedRun, Origin
from medfedaug.runs.prediction.predict import Event, Predictor
from medfedaug.tasks import EvaluationCase, Prediction
from medfedaug.utils.files import version_mark
from medfedaug.utils.validation import check_choice

_ONE_CASE = 2**34  # bytes, enough to decode the files of a case only once
_MARGIN = 0.25  # of the range of calibrated intensities, at both ends: `docs/results/promises` has the rates


@dataclass(frozen=True, eq=False)
class Measured:
    """Curves of a site's cases."""

    # For each structure, the curves of the cases of each patient who has it.
    curves: Mapping[str, Mapping[tuple[str, str], list[Curve]]]
    entry: dict[str, Any]  # the site in `calibration.json`, without structures
    moments: np.ndarray  # mean and standard deviation of each image, (cases, 2, C)

    def losses(self, structure: str) -> np.ndarray:
        """Return the mean loss over the cases of each patient at each level, (n, T)."""
        rows = [np.mean([curve.loss for curve in own], axis=0) for own in self.curves[structure].values()]
        return np.stack(rows) if rows else np.empty((0, len(LEVELS)))


def calibrate(
    run: FinishedRun,
    data: str | Path,
    options: CalibrationOptions,
    *,
    statistics: Path | None = None,
    on_event: Event | None = None,
) -> dict[str, Any]:
    """Calibrate a model at the sites of a folder, each by itself.

    Args:
        run: the run of the model.
        data: a site's folder, or a folder of several sites' folders, as in a simulation.
        options: the promise.
        statistics: as `medfedaug predict --statistics`, for a site that took no part in the run.
        on_event: called with a small dictionary for each case.

    Returns:
        The content of ``calibration.json``. Of several sites, ``pooled`` compares their own thresholds with
        the threshold of all their patients together; no prediction uses it.
    """
    risk = options.risk if run.config.task == "segmentation" else CLASSES
    known = [*run.config.classes[1:]] if risk != CLASSES else [CLASSES]
    for name in options.structures:
        check_choice("--structure", name, known)
    structures = list(options.structures or known)
    tell = on_event or (lambda event: None)
    measured = {
        name: measure(run, data, name, structures, options, statistics=statistics, tell=tell)
        for name in sites_of(run, Path(data))
    }
    content = {
        **version_mark(KIND, VERSION),
        "model": {"sha256": run.sha256, "run": run.record["run"], "round": run.round},
        "task": run.config.task,
        "risk": risk,
        "miss": options.miss,
        "confidence": options.confidence,
        "split": options.split,
        "date": datetime.now(timezone.utc).date().isoformat(),
        "sites": {
            name: {
                **site.entry,
                "structures": {key: _promise(site, key, risk, options) for key in structures},
            }
            for name, site in measured.items()
        },
    }
    if len(measured) > 1:
        content["pooled"] = {key: _pooled(measured, key, risk, options) for key in structures}
    return content


def measure(
    run: FinishedRun,
    data: str | Path,
    name: str,
    structures: Sequence[str],
    options: CalibrationOptions,
    *,
    statistics: Path | None = None,
    tell: Event = lambda event: None,
) -> Measured:
    """Predict a site's cases as `medfedaug predict` does, and compare them with their outlines."""
    known = name in run.record.get("sites", {}) and statistics is None
    origin = Origin.of(run, name if known else None, statistics)
    if origin.pair is None and run.composition.needs_statistics:
        raise ConfigError(
            f"{name} took no part in the run, whose methods normalise with a site's statistics: give "
            "--statistics FILE (medfedaug statistics), to `predict` as well"
        )
    folder = open_own_data(name, run.config, data)
    check_copies([folder])
    if known and not folder.trains:
        warn("lists no training case: one that trained the model cannot be recognised", site=name)
    chosen = folder.cases_of(options.split)
    cases: dict[str, tuple[Case, ...]] = {"training": (), "validation": (), "test": chosen}
    folder = replace(folder, cases=cases)
    predictor = Predictor.prepare(run, origin, folder, options.device)
    curves: dict[str, dict[tuple[str, str], list[Curve]]] = {key: {} for key in structures}
    moments, edges = list[Mapping[str, Tensor]](), list[np.ndarray]()
    tell({"event": "start", "there": 0, "todo": len(chosen)})
    model = predictor.model
    with model.scoring():
        model.network.eval()
        for case in chosen:
            tell({"event": "case", "case": f"{name}: {case.name}"})
            with keep_decoded(_ONE_CASE):
                prepared = model.task.evaluation_case(folder, case)
                prediction = predictor.predict_prepared(prepared, probabilities=True)
                found = _curves(predictor, prepared, prediction, structures, options.risk)
                moments.append(predictor.moments(folder, case))
            for key, curve in found.items():
                curves[key].setdefault(case.owner, []).append(curve)
            if isinstance(folder, VolumeFolder) and (affine := folder.affine(case)) is not None:
                edges.append(edges_in_ras(affine))
            tell({"event": "predicted", "case": case.name})
    used = predictor.statistics(len(chosen))
    rows = np.array([[row[key].numpy() for key in ("mean", "std")] for row in moments])
    entry = {
        "origin": origin.site,
        "statistics": {key: used[key] for key in ("mean", "std", "intensity")} if used else None,
        "cases": len(chosen),
        "ranges": {
            "over": run.composition.statistics_over,
            "mean": _range(rows[:, 0], _MARGIN),
            "std": _range(rows[:, 1], _MARGIN),
            "edges": _range(edges) if len(edges) == len(chosen) else None,
        },
    }
    return Measured(curves, entry, rows)


def _curves(
    predictor: Predictor, case: EvaluationCase, prediction: Prediction, structures: Sequence[str], risk: str
) -> dict[str, Curve]:
    """Return the curve of each structure that a case has annotated and shows."""
    assert prediction.probabilities is not None
    shares = prediction.probabilities.numpy()
    task = predictor.model.task
    if not task.dense:
        return {CLASSES: class_curve(shares, int(case.label))}
    truth, annotated = case.label, None
    if task.annotation is not None:
        decoded = task.annotation.decode(case.label[None])
        truth, annotated = decoded.labels[0], decoded.annotated[0].tolist()
    unit = 1.0 if case.affine is None else abs(float(case.affine[:3, :3].double().det())) / 1000
    curves = {}
    for number, name in enumerate(predictor.run.config.classes):
        outline = (truth[0] == number).numpy()
        if name in structures and outline.any() and (annotated is None or annotated[number]):
            predicted = (prediction.label[0] == number).numpy()
            curves[name] = structure_curve(shares[number], predicted, outline, risk, unit)
    return curves


def _range(rows: np.ndarray | Sequence[np.ndarray], margin: float = 0.0) -> list[list[float]]:
    low, high = np.min(rows, axis=0), np.max(rows, axis=0)
    return [(low - margin * (high - low)).tolist(), (high + margin * (high - low)).tolist()]


def _promise(site: Measured, key: str, risk: str, options: CalibrationOptions) -> dict[str, Any]:
    """Return the threshold of a structure with its cost, or the reason why nothing is promised."""
    losses, needed = site.losses(key), fewest(options.miss, options.confidence)
    entry: dict[str, Any] = {"patients": len(losses), "needed": needed}
    level = controlled_level(losses, options.miss, options.confidence, binary=risk == CLASSES)
    if level is None:
        kind = "patients" if risk == CLASSES else f"patients with {key}"
        return {**entry, "reason": f"{len(losses)} {kind}, and at least {needed} are needed"}
    patients = site.curves[key].values()
    curves = [curve for own in patients for curve in own]
    plain = np.array([curve.plain_size * curve.unit for curve in curves])
    size = np.array([curve.size[level] * curve.unit for curve in curves])
    entry["loss"] = float(losses[:, level].mean())
    entry["plain_loss"] = float(np.mean([np.mean([curve.plain_loss for curve in own]) for own in patients]))
    entry["unit"] = CLASSES if risk == CLASSES else "ml" if curves[0].unit != 1 else "voxels"
    entry["plain_size"], entry["size"] = float(np.median(plain)), float(np.median(size))
    entry["extra"] = [float(value) for value in np.quantile(size - plain, [0.5, 0, 1])]
    if level == 0:
        everything = "the set of all classes" if risk == CLASSES else "a map of the whole image"
        return {**entry, "reason": f"only {everything} keeps the promise: the model finds too little"}
    return {**entry, "threshold": float(LEVELS[level])}


def _pooled(
    sites: Mapping[str, Measured], key: str, risk: str, options: CalibrationOptions
) -> dict[str, Any]:
    """Return the threshold of all sites' patients together, and the mean loss at each site."""
    losses = {name: site.losses(key) for name, site in sites.items()}
    together = np.concatenate([*losses.values()])
    level = controlled_level(together, options.miss, options.confidence, binary=risk == CLASSES)
    if level is None:
        return {"patients": len(together)}
    missed = {name: float(rows[:, level].mean()) for name, rows in losses.items() if len(rows)}
    return {"patients": len(together), "threshold": float(LEVELS[level]), "loss": missed}
