"""The federation as an NVFlare job: recipe, controller, executor, persistor and the simulator."""

from medfedaug.nvflare_jobs.controller import FederationController
from medfedaug.nvflare_jobs.executor import SiteExecutor
from medfedaug.nvflare_jobs.persistor import ModelPersistor
from medfedaug.nvflare_jobs.recipe import MedFedAugRecipe
from medfedaug.nvflare_jobs.simulator import run_in_simulator

__all__ = ["FederationController", "MedFedAugRecipe", "ModelPersistor", "SiteExecutor", "run_in_simulator"]
