"""The job folders of the package, which ``docs/generate.py`` writes.

``medfedaug export`` writes the same with the options of `READY_JOBS`. For other classes, channels, rounds or
numbers of sites, export a custom job.
"""

from pathlib import Path
from typing import Any

from medfedaug.config.run import Execution, RunConfig, task_defaults
from medfedaug.methods import parse_methods
from medfedaug.nvflare_jobs.job.recipe import MedFedAugRecipe

EXECUTION = Execution(min_sites=2, round_timeout=7200.0)
"""Execution settings of all ready jobs."""

_HOSPITALS: dict[str, Any] = {"rounds": 50}
_SEGMENTATION: dict[str, Any] = {"task": "segmentation", **_HOSPITALS}
_CLASSIFICATION: dict[str, Any] = {
    "task": "classification",
    "classes": ("negative", "positive"),
    "in_channels": 3,
    "image_size": 256,
    **_HOSPITALS,
}

READY_JOBS: dict[str, dict[str, Any]] = {
    "segmentation_fedavg": {"methods": "fedavg", **_SEGMENTATION},
    "segmentation_fedrdn": {"methods": "fedrdn", **_SEGMENTATION},
    "segmentation_fedfa": {"methods": "fedfa", **_SEGMENTATION},
    "segmentation_fedrdn_fedfa": {"methods": "fedrdn,fedfa", **_SEGMENTATION},
    "segmentation_fedrdn_fedfa_plus": {"methods": "fedrdn,fedfa+", **_SEGMENTATION},
    "classification_fedfa_plus": {"methods": "fedfa+", **_CLASSIFICATION},
}
"""Fields of `medfedaug.config.run.RunConfig` by the job's name; ``methods`` as on the command line."""


def write_ready_jobs(folder: str | Path) -> list[Path]:
    """Write the jobs of `READY_JOBS`, replacing existing ones."""
    for name, options in READY_JOBS.items():
        methods = parse_methods(options["methods"])
        defaults = task_defaults(options["task"], own_data=True)
        config = RunConfig.from_dict({**defaults, **options, "methods": methods})
        MedFedAugRecipe(config=config, name=name, execution=EXECUTION).export(job_dir=str(folder))
    return [Path(folder) / name for name in READY_JOBS]
