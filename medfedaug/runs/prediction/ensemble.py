"""`Ensemble`: finished runs of the same settings, such as the folds of a data set, that predict together."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from medfedaug.config.run import asked_settings
from medfedaug.errors import ConfigError
from medfedaug.federation.job_folder import GLOBAL_MODEL, RESULTS
from medfedaug.functional.soft_dice_confidence import soft_dice_confidence
from medfedaug.runs.finished_run import FinishedRun
from medfedaug.runs.load_results import find_runs
from medfedaug.runs.model_score import ModelScore
from medfedaug.runs.prediction.predictions_file import first_difference
from medfedaug.tasks import Prediction

__all__ = ["Ensemble", "mean_prediction"]

# Members may differ in these: folds of one data set, and repetitions with other seeds.
_MAY_DIFFER = ("seed", "limit", "holdout")


@dataclass(frozen=True, eq=False)
class Ensemble:
    """Finished runs whose probabilities are averaged, often a single run.

    The hashes of their models order the runs, so that the result does not depend on the order of the
    arguments.
    """

    runs: tuple[FinishedRun, ...]

    @classmethod
    def open(cls, models: Sequence[str | Path], *, state: str | Path | None = None) -> Ensemble:
        """Open runs (`FinishedRun.open`), and check that they have the same settings.

        A folder that is not a run stands for all runs below it, as ``benchmark --folds`` writes them.
        """
        return cls.of([FinishedRun.open(model, state=state) for model in _expanded(models)])

    @classmethod
    def of(cls, runs: Sequence[FinishedRun]) -> Ensemble:
        """Make an ensemble of opened runs."""
        by_hash: dict[str, FinishedRun] = {}
        for run in runs:
            other = by_hash.setdefault(run.sha256, run)
            if other is not run:
                raise ConfigError(f"{run.model} is the same model as {other.model}; name each model once")
            _check_alike(runs[0], run)
        return cls(tuple(by_hash[sha256] for sha256 in sorted(by_hash)))

    @property
    def first(self) -> FinishedRun:
        """A member, for the settings that all members share."""
        return self.runs[0]

    @property
    def sha256(self) -> str:
        """The hash of the model's file, or of the hashes of several models."""
        if len(self.runs) == 1:
            return self.first.sha256
        return hashlib.sha256("\n".join(run.sha256 for run in self.runs).encode()).hexdigest()

    def score(self, site: str = "") -> ModelScore:
        """Return the models' scores in their runs' tests, at a site or in the mean."""
        return ModelScore.of([run.record for run in self.runs], site)

    def identity(self) -> dict[str, Any]:
        """The model's hash, run and round; of several models their common hash and the ``members``."""
        members = [{"sha256": run.sha256, "run": run.record["run"], "round": run.round} for run in self.runs]
        return members[0] if len(members) == 1 else {"sha256": self.sha256, "members": members}


def mean_prediction(predictions: Iterable[Prediction]) -> Prediction:
    """Average the probabilities of several models; the label is the class with the largest mean.

    Predictions of one case come one at a time. A single prediction is returned unchanged, and needs no
    probabilities.
    """
    remaining = iter(predictions)
    first = next(remaining)
    total, count = first.probabilities, 1
    for prediction in remaining:
        assert total is not None
        assert prediction.probabilities is not None
        total, count = torch.add(total, prediction.probabilities), count + 1
    if count == 1 or total is None:
        return first
    label = total.max(dim=0, keepdim=first.label.ndim > 0).indices
    confidence = soft_dice_confidence(total.log(), label[0]) if label.ndim else None
    return Prediction(label, total / count, confidence)


def _expanded(models: Sequence[str | Path]) -> list[Path]:
    """Return the models; instead of a folder that is not a run, the runs below it."""
    paths: list[Path] = []
    for model in map(Path, models):
        is_run = not model.is_dir() or (model / GLOBAL_MODEL).exists() or (model / RESULTS).exists()
        below = [] if is_run or not any(model.rglob(RESULTS)) else find_runs([model])
        paths += below or [model]  # `FinishedRun.open` reports what a folder without any run lacks
    return paths


def _check_alike(first: FinishedRun, run: FinishedRun) -> None:
    """Check that two runs have the same requested settings; a plan from the sites' data may differ."""
    expected, actual = asked_settings(first.record), asked_settings(run.record)
    for name in {**expected, **actual}:
        a, b = expected.get(name), actual.get(name)
        if name not in _MAY_DIFFER and a != b:
            name, b, a = first_difference(name, b, a)
            raise ConfigError(
                f"{run.model.parent} and {first.model.parent} differ in {name} ({b}, and {a}): an ensemble "
                "needs runs with the same settings; name only one run"
            )
