"""Tasks, one file each: samples, loss, inference and metric."""

from medfedaug.tasks.base import EvaluationCase, Prediction, Sample, Task
from medfedaug.tasks.classification import ClassificationTask
from medfedaug.tasks.registry import make_task
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
