"""`simulate` and `configure`, under the name that scripts import."""

from medfedaug.experiments.one_run import simulate
from medfedaug.experiments.simulate import check_device, configure

__all__ = ["check_device", "configure", "simulate"]
