"""`make_task` makes the task of a configuration."""

import dataclasses

from medfedaug.config.run import RunConfig
from medfedaug.tasks.base import Task
from medfedaug.tasks.classification import ClassificationTask
from medfedaug.tasks.segmentation import SegmentationTask

_TASKS: dict[str, type[SegmentationTask] | type[ClassificationTask]] = {
    "segmentation": SegmentationTask,
    "classification": ClassificationTask,
}


def make_task(config: RunConfig, *, normalised: bool) -> Task:
    """Make the task of a run.

    Args:
        config: the run.
        normalised: a method normalises the input (`medfedaug.config.run.RunConfig.input_intensity`,
            `medfedaug.config.run.RunConfig.prepared_plan`).
    """
    intensity = config.input_intensity(normalised=normalised)
    config = dataclasses.replace(config, plan=config.prepared_plan(normalised=normalised))
    task = _TASKS[config.task].from_config(config, intensity)
    task.augments = config.augmentation
    return task
