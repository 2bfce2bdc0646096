"""Tasks, one file each: samples, loss, inference and metric."""

import dataclasses

from medfedaug.config.run import RunConfig
from medfedaug.tasks.base import EvaluationCase, Prediction, Sample, Task
from medfedaug.tasks.classification import ClassificationTask
from medfedaug.tasks.segmentation import SegmentationTask

__all__ = [
    "ClassificationTask",
    "EvaluationCase",
    "Prediction",
    "Sample",
    "SegmentationTask",
    "Task",
    "make_task",
]


def make_task(config: RunConfig, *, normalised: bool) -> Task:
    """Make the task of a run; ``normalised``: a method normalises the input.

    See `medfedaug.config.run.RunConfig.input_intensity` and `medfedaug.config.run.RunConfig.prepared_plan`.
    """
    intensity = config.input_intensity(normalised=normalised)
    config = dataclasses.replace(config, plan=config.prepared_plan(normalised=normalised))
    kind = SegmentationTask if config.task == "segmentation" else ClassificationTask
    task = kind.from_config(config, intensity)
    task.augments = config.augmentation
    return task
