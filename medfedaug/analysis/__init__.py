"""Reading, comparing, plotting and reporting finished runs, and the analysis of features."""

from medfedaug.analysis.alpha import alpha_by_layer, interpolation_weights
from medfedaug.analysis.features import alignment, feature_picture, site_features, uniformity
from medfedaug.analysis.plots import gamma_by_layer, learning_curves, metric_by_bytes
from medfedaug.analysis.report import write_report
from medfedaug.analysis.runs import Run, Tested, find_runs, group_runs, load_run, pool_runs
from medfedaug.analysis.significance import (
    PairedTest,
    PatientTest,
    bootstrap_interval,
    compare_patients,
    detectable_difference,
    paired_t_test,
    wilcoxon_signed_rank,
)
from medfedaug.analysis.tables import (
    PatientRow,
    PatientTable,
    Row,
    Score,
    Table,
    patient_table,
    summary_table,
)

__all__ = [
    "PairedTest",
    "PatientRow",
    "PatientTable",
    "PatientTest",
    "Row",
    "Run",
    "Score",
    "Table",
    "Tested",
    "alignment",
    "alpha_by_layer",
    "bootstrap_interval",
    "compare_patients",
    "detectable_difference",
    "feature_picture",
    "find_runs",
    "gamma_by_layer",
    "group_runs",
    "interpolation_weights",
    "learning_curves",
    "load_run",
    "metric_by_bytes",
    "paired_t_test",
    "patient_table",
    "pool_runs",
    "site_features",
    "summary_table",
    "uniformity",
    "wilcoxon_signed_rank",
    "write_report",
]
