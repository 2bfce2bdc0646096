from .controller import FederationController as FederationController
from .executor import SiteExecutor as SiteExecutor
from .recipe import MedFedAugRecipe as MedFedAugRecipe
from .simulator import run_in_simulator as run_in_simulator
