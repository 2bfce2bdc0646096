"""`medfedaug.runs.finished_run`, under its name in 0.2: it warns, and goes with the version after 0.3."""

import warnings

from medfedaug.runs.finished_run import FinishedRun

__all__ = ["FinishedRun"]

warnings.warn(
    "import FinishedRun from medfedaug.runs.finished_run: medfedaug.finished goes with the version after 0.3",
    DeprecationWarning,
    stacklevel=2,
)
