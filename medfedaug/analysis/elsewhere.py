"""Names of `medfedaug.metrics` and `medfedaug.runs` that scripts import from `medfedaug.analysis`."""

from medfedaug.metrics.significance import (
    PairedTest,
    PatientTest,
    compare_patients,
    detectable_difference,
    paired_t_test,
    sign_flip_test,
)
from medfedaug.runs.load_results import find_runs, load_run
from medfedaug.runs.run import Run

__all__ = [
    "PairedTest",
    "PatientTest",
    "Run",
    "compare_patients",
    "detectable_difference",
    "find_runs",
    "load_run",
    "paired_t_test",
    "sign_flip_test",
]
