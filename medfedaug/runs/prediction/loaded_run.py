"""A finished run in a notebook or a script: its results, its model, and predictions of new images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from medfedaug.runs.finished_run import FinishedRun
from medfedaug.runs.prediction.options import PredictionOptions
from medfedaug.runs.prediction.predict import predict_images
from medfedaug.runs.prediction.predictions_file import Predictions

__all__ = ["LoadedRun", "load_run"]


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

        Raises:
            MedFedAugError: naming the error and its place.
        """
        return predict_images(self, images, out, PredictionOptions(**options))
