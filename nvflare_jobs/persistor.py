"""The server's checkpoints."""

from __future__ import annotations

from typing import Any

from nvflare.app_opt.pt.file_model_persistor import PTFileModelPersistor

from medfedaug.config import RunConfig
from medfedaug.federation.composition import Composition

__all__ = ["ModelPersistor"]


class ModelPersistor(PTFileModelPersistor):
    """NVFlare's PyTorch persistor, with the network that a run's configuration describes.

    Building it here keeps the job free of instances and of class paths outside this package, so that one
    entry, ``medfedaug.``, in a site's allow-list is enough.

    Args:
        config: `medfedaug.config.RunConfig` as a dictionary.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        super().__init__(model=Composition(RunConfig.from_dict(config)).network, allow_numpy_conversion=False)
