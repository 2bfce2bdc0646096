"""Reads, compares, plots and reports finished runs, and analyses features."""

from medfedaug.analysis.features import alignment, feature_picture, site_features, uniformity
from medfedaug.analysis.fedfd_alpha import alpha_by_layer, interpolation_weights
from medfedaug.analysis.grouping import Tested, group_runs, pool_runs
from medfedaug.analysis.metric_table import MetricRow, MetricTable, metric_table
from medfedaug.analysis.patient_table import PatientRow, PatientTable, patient_table
from medfedaug.analysis.plots import gamma_by_layer, learning_curves, metric_by_bytes
from medfedaug.analysis.report import write_report
from medfedaug.analysis.score_table import Row, Score, Table, summary_table
from medfedaug.analysis.verdict import Verdict, judge
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
    "MetricRow",
    "MetricTable",
    "PairedTest",
    "PatientRow",
    "PatientTable",
    "PatientTest",
    "Row",
    "Run",
    "Score",
    "Table",
    "Tested",
    "Verdict",
    "alignment",
    "alpha_by_layer",
    "compare_patients",
    "detectable_difference",
    "feature_picture",
    "find_runs",
    "gamma_by_layer",
    "group_runs",
    "interpolation_weights",
    "judge",
    "learning_curves",
    "load_run",
    "metric_by_bytes",
    "metric_table",
    "paired_t_test",
    "patient_table",
    "pool_runs",
    "sign_flip_test",
    "site_features",
    "summary_table",
    "uniformity",
    "write_report",
]
