"""`Predictor`: a finished model, ready to predict the images of a place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from monai.transforms import Compose

from medfedaug.data.base import Case, SiteFolder
from medfedaug.errors import ConfigError
from medfedaug.federation.job_folder import STATISTICS
from medfedaug.federation.site.model import SiteModel
from medfedaug.runs.finished_run import FinishedRun
from medfedaug.runs.input_statistics import Origin
from medfedaug.tasks import Prediction
from medfedaug.transforms import FedRDNd
from medfedaug.utils.printable import counted


@dataclass(frozen=True, eq=False)
class Predictor:
    """The model of a run with its statistics and layers at the images' place."""

    run: FinishedRun
    origin: Origin
    model: SiteModel
    transform: Compose

    @classmethod
    def prepare(
        cls,
        run: FinishedRun,
        origin: Origin,
        folder: SiteFolder,
        device: str,
    ) -> Predictor:
        """Build the network, with the statistics and layers of the images' place."""
        model = run.at_site(origin.site, folder, device, statistics=origin.pair)
        if not model.recall(run.local_state(origin.site)):
            raise ConfigError(
                "the model needs layers that each site keeps, and a place that did not train has none: give "
                f"--site NAME, one of {', '.join(run.sites_with_layers) or 'none'} in {run.state} (--state "
                "names another folder), or train with the method's argument unseen"
            )
        return cls(run, origin, model, model.evaluation_transform())

    def statistics(self, count: int) -> dict[str, Any] | None:
        """Return the pair that normalises the images, and its source; ``None`` where no method normalises."""
        normalizer = next((t.normalizer for t in self.transform.transforms if isinstance(t, FedRDNd)), None)
        if normalizer is None or normalizer.pair is None:
            return None
        mean, std = (values.tolist() for values in normalizer.pair)
        statistics = {"mean": mean, "std": std, "intensity": self.run.composition.intensity}
        if normalizer.average:
            return {"of": "the average of the federation's sites", **statistics}
        if self.origin.pair is not None:
            return {"of": self.origin.source, **statistics}
        return {"of": f"the {counted(count, 'image')} given", **statistics, "file": STATISTICS}

    def predict(self, folder: SiteFolder, case: Case, *, probabilities: bool) -> Prediction:
        """Predict a case within `SiteModel.scoring`, in evaluation mode."""
        model = self.model
        prepared = model.task.evaluation_case(folder, case, labelled=False)
        return model.task.predict_case(
            model.network, prepared, self.transform, model.config.batch_size, probabilities
        )
