"""`medfedaug.experiments.simulate`, under the name that scripts import."""

from medfedaug.experiments.simulate import check_device, configure, simulate

__all__ = ["check_device", "configure", "simulate"]
