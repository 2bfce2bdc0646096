"""Finished runs: read, compared, drawn and reported on one page; and the features of networks."""

from medfedaug.analysis.alpha import alpha_by_layer, interpolation_weights
from medfedaug.analysis.features import alignment, feature_picture, site_features, uniformity
from medfedaug.analysis.plots import gamma_by_layer, learning_curves, metric_by_bytes
from medfedaug.analysis.report import write_report
from medfedaug.analysis.runs import Run, group_runs, load_run
from medfedaug.analysis.significance import PairedTest, paired_t_test
from medfedaug.analysis.tables import Row, Score, Table, summary_table

__all__ = [
    "PairedTest",
    "Row",
    "Run",
    "Score",
    "Table",
    "alignment",
    "alpha_by_layer",
    "feature_picture",
    "gamma_by_layer",
    "group_runs",
    "interpolation_weights",
    "learning_curves",
    "load_run",
    "metric_by_bytes",
    "paired_t_test",
    "site_features",
    "summary_table",
    "uniformity",
    "write_report",
]
