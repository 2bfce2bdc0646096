"""Components of a script with its own training loop: network, samples, statistics, scores."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
import torch
from monai.transforms import Compose
from monai.utils import CommonKeys as Keys
from torch import Tensor, nn

from medfedaug.data.base import SiteFolder
from medfedaug.errors import ConfigError, MedFedAugError
from medfedaug.federation.site.samples import SiteSamples
from medfedaug.metrics.registry import METRICS, score_of
from medfedaug.sampling import TrainingDataset
from medfedaug.statistics import ChannelStatistics, average_moments, image_moments
from medfedaug.tasks import Sample
from medfedaug.tasks.base import plain_tensor

Score = Callable[[nn.Module, str], Mapping[str, float | None]]
"""Scores a network on a split, and returns the task's metric by the name of the case."""


@dataclass(frozen=True)
class ScriptComponents:
    """Components of a training script; ``None`` stands for the job's own."""

    network: nn.Module | None = None
    methods: tuple[str, ...] | None = None
    samples: Sequence[Sample] | None = None
    score: Score | None = None
    criterion: Callable[[Tensor, Tensor], Tensor] | None = None

    def check(self, site: str, methods: Iterable[str]) -> None:
        """Check that the job is the one that the script was written for."""
        job = tuple(methods)
        if self.methods is not None and set(self.methods) != set(job):
            raise ConfigError(
                f"site {site}: the script takes part with {', '.join(self.methods)}, and the job's methods "
                f"are {', '.join(job)}; export the job with the script's, or leave them out of join()"
            )


class _FixedSamples(Sequence[Sample]):
    """Samples without random patches."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: Any) -> Any:
        return self.samples[index]

    def draw(self, index: int, random: np.random.RandomState) -> Sample:
        return self.samples[index]


class ScriptSamples(SiteSamples):
    """The samples of a site whose training images a script prepares."""

    def __init__(self, *, samples: Sequence[Sample], **site: Any) -> None:
        super().__init__(**site)
        self._own = samples

    def training(self) -> Sequence[Sample]:
        """Return the script's samples."""
        return self._own

    def by_case(self) -> list[Sequence[Sample]]:
        """Return one sample for each training case, in their order."""
        cases = len(self.folder.cases["training"])
        if len(self._own) != cases:
            raise ConfigError(
                f"site {self.folder.name}: the script has {len(self._own)} samples of {cases} cases, and "
                "exchanges about single cases need one sample of each, in their order"
            )
        return [[sample] for sample in self._own]

    def case_moments(self, over: str = "image") -> Iterator[dict[str, Tensor]]:
        """Yield mean and standard deviation of each image that the script prepares, (C,) each."""
        _check_over(over)
        for samples in self.by_case():
            yield image_moments(plain_tensor(samples[0][Keys.IMAGE]))

    def statistics(self, over: str = "image") -> ChannelStatistics:
        """Return the channel statistics of the images that the script prepares."""
        _check_over(over)
        if over not in self._statistics:
            images = (plain_tensor(sample[Keys.IMAGE]) for sample in self._own)
            self._statistics[over] = average_moments(map(image_moments, images))
        return self._statistics[over]

    def dataset(self, seed: int) -> TrainingDataset:
        """Return the script's samples, with the methods' transforms of a round."""
        after = Compose(self._method_transforms(training=True))
        return TrainingDataset(_FixedSamples(self._own), Compose(), None, after, seed)

    def batch_transform(self) -> Compose:
        """Return only the methods' transforms."""
        return Compose(self._method_transforms(training=False))


def _check_over(over: str) -> None:
    if over != "image":
        raise ConfigError(f"statistics over the {over} need the job's own pipeline, and not a script's")


def script_scores(
    score: Score, network: nn.Module, folder: SiteFolder, split: str, metric: str
) -> dict[str, Any]:
    """Convert a script's own scores to those of `medfedaug.tasks.Task.evaluate`; NaN becomes ``None``."""
    names = {case.name for case in folder.cases[split]}
    network.eval()
    with torch.no_grad():
        values = {name: None if s is None else float(s) for name, s in score(network, split).items()}
    scores = {name: None if s is None or math.isnan(s) else s for name, s in values.items()}
    known = [value for value in scores.values() if value is not None]
    problem = ""
    if strange := sorted(scores.keys() - names):
        problem = (
            f"scores {strange[0]!r}, which is no {split} case of the site: scores have the names of files()"
        )
    elif wrong := [value for value in known if score_of(metric, value) is None]:
        problem = (
            f"gives a case the score {wrong[0]:g}, and {metric} is from 0 to {METRICS[metric].largest:g}"
        )
    if problem:
        raise MedFedAugError(f"site {folder.name}: the script {problem}")
    return {metric: fmean(known) if known else None, "cases": scores}
