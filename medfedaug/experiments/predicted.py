"""`predicted_gains`: a trial's gains beside those that its sites' fingerprints predicted."""

from __future__ import annotations

from pathlib import Path

from medfedaug.analysis.calibration_table import FEDAVG, Calibration
from medfedaug.analysis.prospect import make_prospect
from medfedaug.analysis.prospect_page import agreement
from medfedaug.analysis.score_table import Table
from medfedaug.data.quality.image_fingerprint import fingerprint_of
from medfedaug.data.sites import arrange_channels, find_sites
from medfedaug.errors import ConfigError, DataError

__all__ = ["predicted_gains"]


def predicted_gains(data: Path, table: Table, limit: int | None = None) -> list[str]:
    """Say for each method of a trial whether its gain over FedAvg lies in the predicted 80% interval.

    Args:
        data: folder of the sites.
        table: scores of the trial.
        limit: at most so many cases of each split and site.

    Returns:
        A line for each method that the calibration table has, or one that says why there is no prediction.
    """
    means = {row.label: row.mean.mean for row in table.rows}
    base = means.pop(FEDAVG, None)
    gains = {methods: mean - base for methods, mean in means.items() if mean is not None and base is not None}
    try:
        sites = [site for site in arrange_channels(find_sites(data, limit)) if site.trains]
        prospect = make_prospect([fingerprint_of(site) for site in sites], Calibration.load())
    except (ConfigError, DataError) as error:
        return [f"no prediction to compare with: {error}"]
    lines = agreement(prospect, gains)
    return ["Predicted from fingerprints, and measured (gain over fedavg):", *lines] if lines else []
