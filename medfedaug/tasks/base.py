"""`Task`: samples, loss, inference and metric of what is learned."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from monai.networks.utils import one_hot
from monai.transforms import Transform
from monai.utils import CommonKeys as Keys
from monai.utils import convert_to_tensor
from torch import Tensor, nn

from medfedaug.data.annotation import Annotation
from medfedaug.data.base import Case, SiteFolder
from medfedaug.data.preparation.cache import StoredCase
from medfedaug.data.preparation.preparation import Placement, Preparation
from medfedaug.data.sites import checked_statistics
from medfedaug.errors import DataError, warn
from medfedaug.sampling.augmentation import (
    PAPERS_ANGLE,
    Augmentation,
    FlipRotate,
    MonaiAugmentation,
    Sample,
)
from medfedaug.statistics import ChannelStatistics, average_moments
from medfedaug.tasks.losses import Loss

__all__ = ["EvaluationCase", "Pipeline", "Prediction", "Sample", "Task", "plain_tensor", "stack"]

Pipeline = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True, eq=False)
class EvaluationCase:
    """A case that is scored.

    Args:
        name: unique within the site.
        image: (C, *spatial), before the transforms of the methods.
        label: the target; a label map, (1, *spatial), lies on the grid of its file. Empty, (0,), where a case
            is not scored.
        affine: (4, 4), from the voxels of the label map to millimetres; ``None`` where there is none.
        placement: where the image lies in the grid of its file; ``None`` where it is as stored.
        owner: whose it is (`medfedaug.data.base.Case.owner`); ``None`` where it stands for itself.
    """

    name: str
    image: Tensor
    label: Tensor
    affine: Tensor | None = None
    placement: Placement | None = None
    owner: tuple[str, str] | None = None


@dataclass(frozen=True, eq=False)
class Prediction:
    """Prediction of a network for a case, on the CPU.

    Args:
        label: the class, (), of an image; of a volume the label map, (1, X, Y, Z), on the grid of its file.
        probabilities: of the classes, (K,) or (K, X, Y, Z), float32; where a plan has cut away, the
            background has 1. ``None`` where they were not asked for.
        confidence: of a label map, (K - 1,): `soft_dice_confidence` of each class but the background.
    """

    label: Tensor
    probabilities: Tensor | None = None
    confidence: Tensor | None = None


class Task(ABC):
    """Samples, loss, inference and metric of a task; the trainer is the same for all tasks."""

    metric: str
    """The metric that validation has and that chooses the best round."""
    metrics: tuple[str, ...]
    """Metrics of the test, `metric` first."""
    dense: bool
    """Flag: every pixel has a target of its own."""
    left_to_right: int | None
    """The spatial axis that `augmentation` mirrors; ``None`` where the network's images do not have it."""
    num_classes: int
    divisor: int = 1
    """Images are padded so that their sizes are multiples of it."""
    criterion: Loss
    """Criterion that `loss` computes."""
    preparation: Preparation
    """Preparation of the images."""
    intensity: str = "raw"
    """``"raw"`` or ``"scale"``: what images are brought to before anything else."""
    annotation: Annotation | None = None
    """The code of the targets, where some class or voxel of a site may not be annotated."""
    augments: str = "none"
    """`medfedaug.config.run.RunConfig.augmentation`."""
    methods_first: bool = False
    """Flag: the methods' transforms of training images come before the augmentation."""

    @abstractmethod
    def check_site(self, site: SiteFolder) -> None:
        """Check that a site's classes are those of the federation.

        Raises:
            DataError: naming the site.
        """

    @abstractmethod
    def prepared(self, site: SiteFolder, case: Case) -> dict[str, Tensor]:
        """Decode a training case and prepare it for the network, as the site keeps it.

        Returns:
            ``image`` and ``label``, whose first axis counts the items of the case, of which there may be
            none; what `window` needs to cut patches of them, under ``centres``; and what is kept of the
            whole image for the statistics, `Preparation.of_whole`.

        Raises:
            DataError: naming site and file.
        """

    @property
    def key(self) -> str:
        """Cache key: every setting that changes `prepared`."""
        return ""

    @property
    def samples_per_item(self) -> int:
        """Number of training samples that an epoch cuts from an item of `prepared`."""
        return 1

    @property
    def cuts(self) -> bool:
        """Return whether a training sample is a `window` of an item, and not all of it."""
        return False

    def window(self, stored: StoredCase, item: int, random: np.random.RandomState) -> tuple[slice, ...]:
        """Draw the part of an item that makes a training sample: all of it, where the task does not cut."""
        return ()

    def fixed(self, sample: Sample, random: np.random.RandomState) -> Any:
        """Return the part of a training sample that is used where nothing is augmented: all of it.

        Args:
            sample: image and label, as kept or cut by `window`.
            random: draws that are the same each time.

        Returns:
            A sample, or a list of several.
        """
        return sample

    def moments(self, site: SiteFolder, case: Case, over: str = "image") -> dict[str, Tensor]:
        """Mean and deviation, (C,) each, of an image as statistics see it, without its label.

        Args:
            site: the site.
            case: one of its cases.
            over: see `Preparation.moments`.
        """
        image = site.prepared_image(case, self.intensity, self.preparation)
        return self.preparation.moments(image, over)

    def statistics(self, site: SiteFolder, over: str = "image") -> ChannelStatistics:
        """A site's channel statistics over its training images, or where it has none its test images.

        Raises:
            DataError: when an image cannot be read, or a channel is constant in all of them.
        """
        cases = site.cases["training" if site.trains else "test"]
        return checked_statistics(
            site, lambda: average_moments(self.moments(site, case, over) for case in cases)
        )

    def nothing_to_train(self, site: SiteFolder) -> DataError:
        """The error for a site none of whose training cases gives a sample."""
        return DataError("no training case can be used", site=site.name, path=site.path)

    @abstractmethod
    def evaluation_case(self, site: SiteFolder, case: Case, labelled: bool = True) -> EvaluationCase:
        """A case to be scored, or, where it is not ``labelled``, one to be predicted.

        Raises:
            DataError: naming site and file.
        """

    @abstractmethod
    def outputs(
        self,
        network: nn.Module,
        cases: Iterable[EvaluationCase],
        transform: Pipeline,
        device: torch.device,
        batch_size: int = 16,
    ) -> Iterator[tuple[EvaluationCase, Tensor]]:
        """Yield a network's output for each case: the label map of a volume, the logits (K,) of a photograph.

        Args:
            network: in evaluation mode.
            cases: of `evaluation_case`; their labels are not looked at.
            transform: what an image passes before the network sees it.
            device: of the network.
            batch_size: images that the network sees at once.
        """

    @abstractmethod
    def predict_case(
        self,
        network: nn.Module,
        case: EvaluationCase,
        transform: Pipeline,
        device: torch.device,
        batch_size: int = 16,
        probabilities: bool = False,
    ) -> Prediction:
        """Predict a case.

        Args:
            network: in evaluation mode.
            case: of `evaluation_case`; its label is not looked at.
            transform: what an image passes before the network sees it.
            device: of the network.
            batch_size: images that the network sees at once.
            probabilities: whether these are wanted besides.
        """

    def evaluation_cases(
        self, site: SiteFolder, split: str, labelled: bool = True
    ) -> Iterator[EvaluationCase]:
        """The cases of a split, one at a time."""
        return (self.evaluation_case(site, case, labelled) for case in site.cases[split])

    def transforms(self) -> Sequence[Transform]:
        """Transforms of every image, before those of the methods."""
        return ()

    @property
    def spatial_dims(self) -> int:
        """Number of spatial dimensions of the network's input."""
        return self.preparation.plan.spatial_dims

    @property
    def mirrored(self) -> tuple[int, ...]:
        """The spatial axes that the augmentation ``full`` mirrors: all, as nnU-Net does.

        Where the name of a class says left or right, the axis from left to right is left out, and all axes
        where the plan has no orientation: mirrored, a left kidney is a right one.
        """
        axes = tuple(range(self.spatial_dims))
        if not any(side in name.lower() for name in self.scored_classes for side in ("left", "right")):
            return axes
        known = self.preparation.plan.orientation is not None
        return tuple(axis for axis in axes if axis != self.left_to_right) if known else ()

    def augmentation(self) -> Augmentation | None:
        """Flips and rotations of training images, after `transforms`; ``None`` for none.

        Warns where images are to be mirrored and have no axis from left to right.
        """
        if self.augments == "none":
            return None
        if self.augments in ("intensity", "full"):
            keys = (Keys.IMAGE, Keys.LABEL) if self.dense else (Keys.IMAGE,)
            return MonaiAugmentation(self.augments, self.spatial_dims, keys, self.mirrored)
        if self.left_to_right is None:
            warn(
                f"augmentation {self.augments} mirrors left and right, and with orientation "
                f"{self.preparation.plan.orientation} slices are cut across that axis: none is mirrored"
            )
        angle = PAPERS_ANGLE if self.augments == "flip_rotate" else 0.0
        labels = ((Keys.LABEL, "nearest"),) if self.dense else ()
        return FlipRotate(angle, axis=self.left_to_right, modes=((Keys.IMAGE, "bilinear"), *labels))

    @abstractmethod
    def collate(self, samples: list[Sample]) -> Sample:
        """Make a batch of samples."""

    def probabilities(self, targets: Tensor) -> Tensor:
        """Return targets as probabilities of the classes, (B, K, ...), to be averaged and given to `loss`."""
        return one_hot(targets if self.dense else targets[:, None], self.num_classes)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The scalar that training minimises, of logits and of targets as labels or as `probabilities`."""
        return self.criterion(outputs, targets)

    @torch.no_grad()
    def evaluate(
        self,
        network: nn.Module,
        cases: Iterable[EvaluationCase],
        transform: Pipeline,
        device: torch.device,
        batch_size: int = 16,
        full: bool = False,
    ) -> dict[str, Any]:
        """Score a network.

        Args:
            network: the network.
            cases: what is scored.
            transform: what an image passes before the network sees it.
            device: where to compute.
            batch_size: images that the network sees at once.
            full: whether to compute all of `metrics` by class, or `metric` alone.

        Returns:
            As `scores`.
        """
        network.eval()
        return self.scores(self.outputs(network, cases, transform, device, batch_size), full)

    @abstractmethod
    def scores(self, outputs: Iterable[tuple[EvaluationCase, Tensor]], full: bool) -> dict[str, Any]:
        """Score what a network says of cases.

        Args:
            outputs: of `outputs`, one at a time.
            full: see `evaluate`.

        Returns:
            ``{metric: mean or None, "cases": {name: score or None}}``, ``None`` where nothing can be scored;
            with ``full`` also the mean of each of `metrics`, under ``"classes"`` those of each class, and
            under ``"case_metrics"`` the scores by case of those metrics that have any.
        """

    @property
    @abstractmethod
    def scored_classes(self) -> tuple[str, ...]:
        """The classes that have scores of their own."""


def plain_tensor(value: Any) -> Tensor:
    """A tensor without MONAI's meta data, which would follow the features into statistics and messages."""
    return convert_to_tensor(value, track_meta=False)


def stack(samples: Sequence[Sample]) -> Sample:
    """A batch of samples whose images have one size."""
    return {key: torch.stack([plain_tensor(s[key]) for s in samples]) for key in (Keys.IMAGE, Keys.LABEL)}
