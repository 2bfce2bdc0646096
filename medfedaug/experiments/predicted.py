"""`prospect_of`: what is predicted of a folder of sites, and how a trial's gains compare with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from medfedaug.analysis.calibration_table import FEDAVG, Calibration
from medfedaug.analysis.prospect import Prospect, make_prospect
from medfedaug.analysis.prospect_page import agreement
from medfedaug.analysis.score_table import Table
from medfedaug.data.quality.image_fingerprint import SAMPLE, fingerprint_of
from medfedaug.data.sites import arrange_channels, find_sites
from medfedaug.errors import ConfigError

__all__ = ["predicted_gains", "prospect_of"]


def prospect_of(
    data: Path,
    table: Calibration,
    limit: int | None = None,
    sample: int = SAMPLE,
    on_case: Callable[[int, int], None] | None = None,
) -> Prospect:
    """Predict gains from the images of the sites that train.

    Args:
        data: folder of the sites.
        table: the calibration.
        limit: at most so many cases of each split and site.
        sample: training cases of each site to look at, evenly from its list.
        on_case: called with the number of cases of a site so far and of all.

    Raises:
        ConfigError: for fewer than two sites that train, and for sites that cannot be compared.
        DataError: for images that cannot be read.
    """
    sites = [site for site in arrange_channels(find_sites(data, limit)) if site.trains]
    if len(sites) < 2:
        raise ConfigError(f"a prospect needs two sites that train, and {data} has {len(sites)}")
    return make_prospect([fingerprint_of(site, sample, on_case) for site in sites], table)


def predicted_gains(prospect: Prospect, table: Table) -> list[str]:
    """Say for each method of a trial whether its gain over FedAvg lies in the predicted 80% interval.

    Args:
        prospect: the prediction.
        table: scores of the trial.

    Returns:
        A line for each method that the calibration table has.
    """
    means = {row.label: row.mean.mean for row in table.rows}
    base = means.pop(FEDAVG, None)
    gains = {methods: mean - base for methods, mean in means.items() if mean is not None and base is not None}
    lines = agreement(prospect, gains)
    return ["Predicted from fingerprints, and measured (gain over fedavg):", *lines] if lines else []
