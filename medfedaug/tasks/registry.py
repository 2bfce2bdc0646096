"""`make_task`: the task that a configuration names."""

from __future__ import annotations

from medfedaug.config import RunConfig
from medfedaug.tasks.base import Task
from medfedaug.tasks.classification import ClassificationTask
from medfedaug.tasks.slices import SegmentationTask

__all__ = ["make_task"]

_TASKS: dict[str, type[Task]] = {"segmentation": SegmentationTask, "classification": ClassificationTask}


def make_task(config: RunConfig, *, normalised: bool) -> Task:
    """The task that a configuration names.

    Args:
        config: the run.
        normalised: whether a method normalises the intensities. Where none does, each volume is scaled to
            [0, 1] by itself and photographs are divided by 255, as the papers' plain FedAvg sees its images.
    """
    intensity = "scale" if config.intensity == "scale" or not normalised else "raw"
    task = _TASKS[config.task].from_config(config, intensity)
    task.augments = config.augmentation
    return task
