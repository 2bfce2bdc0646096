"""Names of `medfedaug.metrics` and `medfedaug.runs` that scripts import from `medfedaug.analysis`."""

from medfedaug.metrics.significance import PairedTest as PairedTest
from medfedaug.metrics.significance import PatientTest as PatientTest
from medfedaug.metrics.significance import compare_patients as compare_patients
from medfedaug.metrics.significance import detectable_difference as detectable_difference
from medfedaug.metrics.significance import paired_t_test as paired_t_test
from medfedaug.metrics.significance import sign_flip_test as sign_flip_test
from medfedaug.runs.load_results import find_runs as find_runs
from medfedaug.runs.load_results import load_run as load_run
from medfedaug.runs.run import Run as Run
