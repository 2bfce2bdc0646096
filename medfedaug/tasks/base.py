"""`Task`: samples, loss, inference and metric of a task."""

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

from medfedaug.config.bundle_reference import PREDICTS
from medfedaug.data.annotation import Annotation
from medfedaug.data.base import Case, SiteFolder
from medfedaug.data.preparation.cache import StoredCase
from medfedaug.data.preparation.preparation import Placement, Preparation
from medfedaug.data.sites import checked_statistics
from medfedaug.errors import ConfigError, DataError, warn
from medfedaug.sampling import PAPERS_ANGLE, Augmentation, FlipRotate, MonaiAugmentation, Sample
from medfedaug.statistics import ChannelStatistics, average_moments
from medfedaug.tasks.losses import Loss

Pipeline = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True, eq=False)
class EvaluationCase:
    """A case for scoring or prediction."""

    name: str  #: unique within the site
    image: Tensor  #: (C, *spatial), before the transforms of the methods
    #: The target; a label map, (1, *spatial), lies on the grid of its file. Empty, (0,), for prediction.
    label: Tensor
    affine: Tensor | None = None  #: (4, 4), from the voxels of the label map to millimetres, if known
    #: Place of the image in the grid of its file; `None` for an image as stored.
    placement: Placement | None = None
    #: The patient (`medfedaug.data.base.Case.owner`); `None` for a case that stands for itself.
    owner: tuple[str, str] | None = None


@dataclass(frozen=True, eq=False)
class Prediction:
    """Prediction of a network for a case, on the CPU."""

    #: The class, (), of an image; of a volume the label map, (1, X, Y, Z), on the grid of its file.
    label: Tensor
    #: Probabilities of the classes, (K,) or (K, X, Y, Z), float32, if requested.
    probabilities: Tensor | None = None
    #: `soft_dice_confidence` of each class of a label map but the background, (K - 1,).
    confidence: Tensor | None = None


class Task(ABC):
    """Samples, loss, inference and metric of a task; the trainer is the same for all tasks."""

    metric: str
    """Metric of the validation, which chooses the best round."""
    metrics: tuple[str, ...]
    """Metrics of the test, `metric` first."""
    dense: bool
    """Flag: every pixel has a target."""
    left_to_right: int | None
    """Spatial axis that `augmentation` mirrors; ``None`` if the network's images do not have it."""
    num_classes: int
    divisor: int = 1
    """Padding makes sizes of images multiples of it."""
    criterion: Loss
    preparation: Preparation
    intensity: str = "raw"
    """``"raw"`` or ``"scale"``: first scaling of the images."""
    annotation: Annotation | None = None
    """The code of the targets, if a site may lack annotations of some class or voxel."""
    augments: str = "none"
    """`medfedaug.config.run.RunConfig.augmentation`."""
    methods_first: bool = False
    """Flag: the methods' transforms of training images come before the augmentation."""

    def check_site(self, site: SiteFolder) -> None:
        """Check that a site fits the task, and has the federation's classes; a `DataError` names the site."""
        task = "segmentation" if self.dense else "classification"
        if site.task != task:
            raise site.error(f"is for {site.task}, the run for {task}", site.path)

    @abstractmethod
    def prepared(self, site: SiteFolder, case: Case) -> dict[str, Tensor]:
        """Decode a training case and prepare it for the network, as the site keeps it.

        The first axis of ``image`` and ``label`` counts the items of the case, possibly none; `window` cuts
        patches with ``centres``; `Preparation.of_whole` has entries of the whole image for the statistics.
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
        """Draw the part of an item that makes a training sample; an empty tuple is all of it."""
        return ()

    def fixed(self, sample: Sample, random: np.random.RandomState) -> Any:
        """Return a training sample, as kept or cut by `window`, or a list of several, without augmentation.

        Draws of ``random`` are the same each time.
        """
        return sample

    def moments(self, site: SiteFolder, case: Case, over: str = "image") -> dict[str, Tensor]:
        """Return mean and standard deviation, (C,) each, of a case's image (`Preparation.moments`)."""
        image = site.prepared_image(case, self.intensity, self.preparation)
        return self.preparation.moments(image, over)

    def statistics(self, site: SiteFolder, over: str = "image") -> ChannelStatistics:
        """Compute channel statistics over a site's training images, or without such its test images."""
        cases = site.cases["training" if site.trains else "test"]
        return checked_statistics(
            site, lambda: average_moments(self.moments(site, case, over) for case in cases)
        )

    def nothing_to_train(self, site: SiteFolder) -> DataError:
        """Return the error for a site without training samples."""
        return site.error("no training case can be used", site.path)

    @abstractmethod
    def evaluation_case(self, site: SiteFolder, case: Case, labelled: bool = True) -> EvaluationCase:
        """Load a case for scoring, or without ``labelled`` for prediction."""

    @abstractmethod
    def outputs(
        self, network: nn.Module, cases: Iterable[EvaluationCase], transform: Pipeline, batch_size: int = 16
    ) -> Iterator[tuple[EvaluationCase, Tensor]]:
        """Yield a network's output for each case: the label map of a volume, the logits (K,) of a photograph.

        The network is in evaluation mode; labels of the cases are not used.
        """

    def predict_case(
        self,
        network: nn.Module,
        case: EvaluationCase,
        transform: Pipeline,
        batch_size: int = 16,
        probabilities: bool = False,
    ) -> Prediction:
        """Predict a case, with ``probabilities`` on request; other arguments as in `outputs`."""
        raise ConfigError(PREDICTS)  # a Bundle, whose inference is its own

    def transforms(self) -> Sequence[Transform]:
        """Return transforms of every image, which come before the methods' transforms."""
        return ()

    @property
    def spatial_dims(self) -> int:
        """Number of spatial dimensions of the network's input."""
        return self.preparation.plan.spatial_dims

    @property
    def mirrored(self) -> tuple[int, ...]:
        """The spatial axes that the augmentation ``full`` mirrors: all, as in nnU-Net.

        If the name of a class says left or right, the axis from left to right is not mirrored, and no axis if
        the plan has no orientation: mirrored, a left kidney is a right one.
        """
        axes = tuple(range(self.spatial_dims))
        if not any(side in name.lower() for name in self.scored_classes for side in ("left", "right")):
            return axes
        known = self.preparation.plan.orientation is not None
        return tuple(axis for axis in axes if axis != self.left_to_right) if known else ()

    def augmentation(self) -> Augmentation | None:
        """Return the augmentation of training images, after `transforms`, if any.

        Warns if images are to be mirrored and have no axis from left to right.
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
        """Return targets as probabilities of the classes, (B, K, ...), for averages and `loss`."""
        return one_hot(targets if self.dense else targets[:, None], self.num_classes)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Compute the training loss of logits and of targets as labels or as `probabilities`."""
        return self.criterion(outputs, targets)

    @torch.no_grad()
    def evaluate(
        self,
        network: nn.Module,
        cases: Iterable[EvaluationCase],
        transform: Pipeline,
        batch_size: int = 16,
        full: bool = False,
    ) -> dict[str, Any]:
        """Score a network (`scores`); ``full`` computes all of `metrics` by class, not `metric` alone."""
        network.eval()
        return self.scores(self.outputs(network, cases, transform, batch_size), full)

    @abstractmethod
    def scores(self, outputs: Iterable[tuple[EvaluationCase, Tensor]], full: bool) -> dict[str, Any]:
        """Score a network's `outputs`, one at a time.

        The result is ``{metric: mean or None, "cases": {name: score or None}}``; ``None`` without a score.
        With ``full`` it also has the mean of each of `metrics`, by class under ``"classes"``, and by case
        under ``"case_metrics"`` for metrics of cases.
        """

    @property
    def scored_classes(self) -> tuple[str, ...]:
        """Classes with a score; none where the metrics of a Bundle decide."""
        return ()


def device_of(network: nn.Module) -> torch.device:
    """Return the device of a network, the CPU for one without parameters."""
    return next((parameter.device for parameter in network.parameters()), torch.device("cpu"))


def plain_tensor(value: Any) -> Tensor:
    """Drop MONAI's metadata, which would follow the features into statistics and messages."""
    return convert_to_tensor(value, track_meta=False)


def stack(samples: Sequence[Sample]) -> Sample:
    """Make a batch of samples whose images have one size."""
    return {key: torch.stack([plain_tensor(s[key]) for s in samples]) for key in (Keys.IMAGE, Keys.LABEL)}
