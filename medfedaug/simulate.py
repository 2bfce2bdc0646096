"""`medfedaug.experiments.simulate`, under the name that scripts import."""

from medfedaug.experiments.simulate import ENGINES, check_device, configure, simulate

__all__ = ["ENGINES", "check_device", "configure", "simulate"]
