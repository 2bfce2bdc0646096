from .elsewhere import (
    PairedTest as PairedTest,
)
from .elsewhere import (
    PatientTest as PatientTest,
)
from .elsewhere import (
    Run as Run,
)
from .elsewhere import (
    compare_patients as compare_patients,
)
from .elsewhere import (
    detectable_difference as detectable_difference,
)
from .elsewhere import (
    find_runs as find_runs,
)
from .elsewhere import (
    load_run as load_run,
)
from .elsewhere import (
    paired_t_test as paired_t_test,
)
from .elsewhere import (
    sign_flip_test as sign_flip_test,
)
from .features import (
    alignment as alignment,
)
from .features import (
    feature_picture as feature_picture,
)
from .features import (
    site_features as site_features,
)
from .features import (
    uniformity as uniformity,
)
from .fedfd_alpha import alpha_by_layer as alpha_by_layer
from .fedfd_alpha import interpolation_weights as interpolation_weights
from .grouping import Tested as Tested
from .grouping import group_runs as group_runs
from .grouping import pool_runs as pool_runs
from .metric_table import MetricRow as MetricRow
from .metric_table import MetricTable as MetricTable
from .metric_table import metric_table as metric_table
from .patient_table import (
    PatientRow as PatientRow,
)
from .patient_table import (
    PatientTable as PatientTable,
)
from .patient_table import (
    patient_table as patient_table,
)
from .plots import (
    gamma_by_layer as gamma_by_layer,
)
from .plots import (
    learning_curves as learning_curves,
)
from .plots import (
    metric_by_bytes as metric_by_bytes,
)
from .predictions_page import write_predictions_page as write_predictions_page
from .report import write_report as write_report
from .score_table import Row as Row
from .score_table import Score as Score
from .score_table import Table as Table
from .score_table import summary_table as summary_table
from .verdict import Verdict as Verdict
from .verdict import judge as judge
