"""Features of the sites' local models (FedRDN Fig. 3, FedFA+ Fig. 4)."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from medfedaug.analysis.grouping import group_runs
from medfedaug.errors import MedFedAugError, warn
from medfedaug.federation.site.trainer import SiteTrainer
from medfedaug.research.comparison.features import SiteFeatures
from medfedaug.research.comparison.report_images import data_of, example_cases
from medfedaug.research.sweeps.cross_site import train_local_models
from medfedaug.runs.run import Run


def local_features(
    runs: Sequence[Run], data: str | Path, device: str = "auto"
) -> dict[Path, dict[str, SiteFeatures]]:
    """Compute features of each local model at every site, for the first run of each method.

    Returns:
        By the run's file and the site that trained the model. A run without local models has none, and a
        warning gives the reason.
    """
    features: dict[Path, dict[str, SiteFeatures]] = {}
    for run in (members[0] for members in group_runs(runs).values()):
        of_run = features[run.path] = {}

        def visit(
            source: str, sites: Mapping[str, SiteTrainer], of_run: dict[str, SiteFeatures] = of_run
        ) -> None:
            of_run[source] = SiteFeatures()
            for target in sites.values():
                of_run[source].add(target, sites[source].network, example_cases(target.folder))

        try:
            with data_of(run, Path(data)) as root:
                train_local_models(run.path.parent, root, device, visit)
        except (MedFedAugError, ValueError) as error:
            warn(f"{run.label}: no features of local models ({error})")
    return features
