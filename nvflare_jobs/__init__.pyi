from .job.controller import FederationController as FederationController
from .job.executor import SiteExecutor as SiteExecutor
from .job.recipe import MedFedAugRecipe as MedFedAugRecipe
from .simulator.simulator import run_in_simulator as run_in_simulator
