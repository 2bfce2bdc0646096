"""What is learned: samples, loss, inference and metric of a task."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, ClassVar

import torch
from monai.data.utils import pad_list_data_collate
from monai.inferers import SliceInferer
from monai.losses import DiceCELoss
from monai.metrics import DiceMetric
from monai.networks.utils import one_hot
from monai.transforms import (
    CastToTyped,
    DivisiblePad,
    DivisiblePadd,
    Lambdad,
    ScaleIntensityRanged,
    Transform,
)
from monai.utils import CommonKeys as Keys
from monai.utils import convert_to_tensor
from torch import Tensor, nn

from medfedaug.config import RunConfig
from medfedaug.data.augmentation import PAPERS_ANGLE, FlipRotate, Sample
from medfedaug.data.base import SiteFolder
from medfedaug.data.resizing import resize_in_plane
from medfedaug.data.volumes import VolumeFolder
from medfedaug.errors import ConfigError, DataError

__all__ = ["ClassificationTask", "SegmentationTask", "Task", "make_task"]

Pipeline = Callable[[dict[str, Any]], dict[str, Any]]
EvaluationCase = tuple[str, Tensor, Tensor]


class Task(ABC):
    """Samples, loss, inference and metric; the trainer is the same for all tasks."""

    metric: ClassVar[str]
    dense: ClassVar[bool]
    """Whether every pixel has a target of its own."""
    num_classes: int
    augments: str = "none"
    """`medfedaug.config.RunConfig.augmentation`."""

    @abstractmethod
    def check_site(self, site: SiteFolder) -> None:
        """Check that a site's classes are those of the federation.

        Raises:
            DataError: naming the site.
        """

    @abstractmethod
    def case_samples(self, site: SiteFolder) -> Iterator[list[Sample]]:
        """The training samples of each training case, decoded; a case may have none."""

    def training_samples(self, site: SiteFolder) -> list[Sample]:
        """All training samples of a site, decoded."""
        return [sample for samples in self.case_samples(site) for sample in samples]

    @abstractmethod
    def evaluation_cases(self, site: SiteFolder, split: str) -> Iterator[EvaluationCase]:
        """The cases of a split one at a time: name, image and label."""

    def transforms(self) -> Sequence[Transform]:
        """What every image passes before the methods' transforms."""
        return ()

    def augmentation(self) -> FlipRotate | None:
        """What training images pass after `transforms`: flips, rotations, or nothing."""
        if self.augments == "none":
            return None
        angle = PAPERS_ANGLE if self.augments == "flip_rotate" else 0.0
        # Volumes are indexed (x, y, z): their first axis is left to right, as is a photograph's second.
        if self.dense:
            return FlipRotate(angle, axis=0, modes=((Keys.IMAGE, "bilinear"), (Keys.LABEL, "nearest")))
        return FlipRotate(angle, axis=1)

    @abstractmethod
    def collate(self, samples: list[Sample]) -> Sample:
        """A batch."""

    @abstractmethod
    def probabilities(self, targets: Tensor) -> Tensor:
        """Targets as probabilities of the classes, (B, K, ...), which can be averaged and given to `loss`."""

    @abstractmethod
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The scalar that training minimises, with targets as labels or as `probabilities`."""

    @abstractmethod
    def evaluate(
        self,
        network: nn.Module,
        cases: Iterable[EvaluationCase],
        transform: Pipeline,
        device: torch.device,
        batch_size: int = 16,
    ) -> dict[str, Any]:
        """Score a network.

        Returns:
            ``{metric: mean or None, "cases": {name: score or None}}``.
        """


class SegmentationTask(Task):
    """Slice-wise segmentation of volumes: trained on slices, scored on patients.

    Training takes the slices with foreground, along the last axis of a volume, as the papers do; evaluation
    takes all slices. The loss is MONAI's Dice (foreground classes, over the batch) plus cross-entropy; the
    metric is Dice without background, per patient volume. A patient without any foreground has no Dice and
    does not enter the mean.

    Args:
        num_classes: classes, background included.
        intensity: as in `medfedaug.config.RunConfig`.
        divisor: in-plane sizes are padded to multiples of it, as a U-Net with four poolings needs.
        image_size: slices are resized to so many pixels in both directions for the network, and its logits
            back to the volume's grid, on which they are scored; ``None`` leaves them as they are.
    """

    metric = "dice"
    dense = True

    def __init__(
        self, num_classes: int, intensity: str = "raw", divisor: int = 16, image_size: int | None = None
    ) -> None:
        self.num_classes, self.intensity, self.divisor = num_classes, intensity, divisor
        self.image_size = image_size
        self.criterion = DiceCELoss(include_background=False, to_onehot_y=True, softmax=True, batch=True)
        self.soft_criterion = DiceCELoss(include_background=False, softmax=True, batch=True)

    def check_site(self, site: SiteFolder) -> None:
        """As many classes as the federation has; what a site calls them is its own affair."""
        if not isinstance(site, VolumeFolder):
            raise DataError("has no volumes with label maps", site=site.name, path=site.path)
        if len(site.classes) != self.num_classes:
            raise DataError(
                f"{len(site.classes)} classes, the federation expects {self.num_classes}",
                site=site.name,
                path=site.path / site.listing,
            )

    def case_samples(self, site: SiteFolder) -> Iterator[list[Sample]]:
        """The training slices with foreground of each volume: image (C, H, W) and label (1, H, W).

        Raises:
            DataError: naming the site, when no volume has any.
        """
        assert isinstance(site, VolumeFolder)
        found = False
        for case in site.cases["training"]:
            image, label = site.load_case(case, self.intensity)
            indices = label.flatten(0, 2).any(dim=0).nonzero().flatten().tolist()
            found = found or bool(indices)
            # Cloned, or one slice would keep its whole volume in memory.
            slices = [(image[..., i].clone(), label[..., i].clone()) for i in indices]
            yield [
                {
                    Keys.IMAGE: resize_in_plane(x, self.image_size),
                    Keys.LABEL: resize_in_plane(y, self.image_size, "nearest-exact"),
                }
                for x, y in slices
            ]
        if not found:
            raise DataError(
                "no training slice has any foreground",
                site=site.name,
                path=site.path,
                hint="Check the label maps.",
            )

    def evaluation_cases(self, site: SiteFolder, split: str) -> Iterator[EvaluationCase]:
        """The volumes of a split: name, image (C, H, W, D) and label (1, H, W, D), one at a time."""
        assert isinstance(site, VolumeFolder)
        for case in site.cases[split]:
            yield (case.name, *site.load_case(case, self.intensity))

    def collate(self, samples: list[Sample]) -> Sample:
        """Pad to a common size that the network takes, and stack."""
        pad = DivisiblePadd(keys=(Keys.IMAGE, Keys.LABEL), k=self.divisor, allow_missing_keys=True)
        sizes = {tuple(sample[Keys.IMAGE].shape[1:]) for sample in samples}
        if all(n % self.divisor == 0 for size in sizes for n in size):
            if len(sizes) == 1:
                return {
                    key: torch.stack([_plain(s[key]) for s in samples]) for key in (Keys.IMAGE, Keys.LABEL)
                }
            return _plain_batch(pad_list_data_collate(samples))
        return _plain_batch(pad_list_data_collate([pad(sample) for sample in samples]))

    def probabilities(self, targets: Tensor) -> Tensor:
        """(B, 1, H, W) as one-hot (B, K, H, W)."""
        return one_hot(targets, self.num_classes)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Dice plus cross-entropy of logits (B, K, H, W) and labels (B, 1, H, W) or probabilities."""
        soft = targets.shape[1] == self.num_classes
        return self.soft_criterion(outputs, targets) if soft else self.criterion(outputs, targets)

    @torch.no_grad()
    def evaluate(
        self,
        network: nn.Module,
        cases: Iterable[EvaluationCase],
        transform: Pipeline,
        device: torch.device,
        batch_size: int = 16,
    ) -> dict[str, Any]:
        """Dice per patient volume.

        Returns:
            ``{"dice": mean or None, "cases": {name: dice or None}}``; ``None`` where there is no foreground.
        """
        network.eval()
        scores: dict[str, float | None] = {}
        for name, image, label in cases:
            predicted = self.predict(network, transform({Keys.IMAGE: image})[Keys.IMAGE], device, batch_size)
            metric = DiceMetric(include_background=False, reduction="mean")
            metric(
                y_pred=one_hot(predicted[None], self.num_classes),
                y=one_hot(label[None].to(device), self.num_classes),
            )
            value = float(metric.aggregate())  # type: ignore[arg-type]
            # MONAI reports 0 when nothing could be scored; the count of scored classes tells the two apart.
            scores[name] = value if bool(label.any()) else None
        known = [value for value in scores.values() if value is not None]
        return {"dice": sum(known) / len(known) if known else None, "cases": scores}

    @torch.no_grad()
    def predict(
        self, network: nn.Module, image: Tensor, device: torch.device, batch_size: int = 16
    ) -> Tensor:
        """The label map (1, H, W, D) of a volume (C, H, W, D), slice by slice."""
        plain = _plain(image).to(device)
        height, width = plain.shape[1:3]
        plain = resize_in_plane(plain, self.image_size)
        rows, columns = plain.shape[1:3]
        padded = _plain(DivisiblePad(k=(self.divisor, self.divisor, 1), method="end")(plain))
        infer = SliceInferer(roi_size=tuple(padded.shape[1:3]), spatial_dim=2, sw_batch_size=batch_size)
        found = infer(padded[None], network)
        assert isinstance(found, Tensor)
        logits = found[0, :, :rows, :columns]
        if self.image_size:
            slices = nn.functional.interpolate(logits.permute(3, 0, 1, 2), (height, width), mode="bilinear")
            logits = slices.permute(1, 2, 3, 0)
        return logits.max(dim=0, keepdim=True).indices  # on a CPU in a tenth of the time of `argmax`


class ClassificationTask(Task):
    """Classification of photographs: cross-entropy, top-1 accuracy.

    Args:
        classes: the federation's classes; a site may lack some.
        scale: whether pixels are divided by 255; otherwise they stay 0 to 255 for a method to normalise.
        image_size: images are resized to it, and need not be where all have one size.
    """

    metric = "accuracy"
    dense = False

    def __init__(self, classes: Sequence[str], scale: bool, image_size: int | None = None) -> None:
        self.classes, self.scale, self.image_size = tuple(classes), scale, image_size
        self.num_classes = len(self.classes)
        self.criterion = nn.CrossEntropyLoss()

    def check_site(self, site: SiteFolder) -> None:
        """No class that the federation does not know."""
        if site.task != "classification":
            raise DataError("has no images in a folder a class", site=site.name, path=site.path)
        unknown = sorted(set(site.classes) - set(self.classes))
        if unknown:
            raise DataError(
                f"the class {unknown[0]!r} is not among the federation's: {', '.join(self.classes)}",
                site=site.name,
                path=site.path,
            )

    def case_samples(self, site: SiteFolder) -> Iterator[list[Sample]]:
        """Each training image as uint8 (C, H, W), a quarter of its size as numbers; label ()."""
        for _, image, label in self.evaluation_cases(site, "training"):
            yield [{Keys.IMAGE: image, Keys.LABEL: label}]

    def evaluation_cases(self, site: SiteFolder, split: str) -> Iterator[EvaluationCase]:
        """The images of a split: name, image as uint8 (C, H, W), label ()."""
        for case in site.cases[split]:
            # Resized here already, and not at each of the many times that `transforms` are applied to it.
            image = resize_in_plane(site.load_image(case), self.image_size)
            yield case.name, image, torch.tensor(self.classes.index(str(case.label)))

    def transforms(self) -> Sequence[Transform]:
        """Resizing where it is asked for, and floating point."""
        resize = [Lambdad(keys=Keys.IMAGE, func=partial(resize_in_plane, size=self.image_size))]
        resize = resize if self.image_size else []
        if self.scale:
            return [*resize, ScaleIntensityRanged(keys=Keys.IMAGE, a_min=0, a_max=255, b_min=0.0, b_max=1.0)]
        return [*resize, CastToTyped(keys=Keys.IMAGE, dtype=torch.float32)]

    def collate(self, samples: list[Sample]) -> Sample:
        """Stack images of one size."""
        sizes = {tuple(sample[Keys.IMAGE].shape[1:]) for sample in samples}
        if len(sizes) > 1:
            first, second = sorted(sizes)[:2]
            raise ConfigError(f"images of different size, {first} and {second}: choose --image-size")
        return {key: torch.stack([_plain(s[key]) for s in samples]) for key in (Keys.IMAGE, Keys.LABEL)}

    def probabilities(self, targets: Tensor) -> Tensor:
        """(B,) as one-hot (B, K)."""
        return one_hot(targets[:, None], len(self.classes))

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy of logits (B, K) and classes (B,) or probabilities (B, K)."""
        return self.criterion(outputs, targets)

    @torch.no_grad()
    def evaluate(
        self,
        network: nn.Module,
        cases: Iterable[EvaluationCase],
        transform: Pipeline,
        device: torch.device,
        batch_size: int = 16,
    ) -> dict[str, Any]:
        """Top-1 accuracy; the score of a case is 1 or 0."""
        network.eval()
        scores: dict[str, float | None] = {}
        remaining = iter(cases)
        while chunk := list(islice(remaining, batch_size)):
            batch = self.collate(
                [
                    {Keys.IMAGE: transform({Keys.IMAGE: image})[Keys.IMAGE], Keys.LABEL: y}
                    for _, image, y in chunk
                ]
            )
            inputs = batch[Keys.IMAGE].to(device, memory_format=torch.channels_last)
            right = network(inputs).argmax(dim=1).cpu() == batch[Keys.LABEL]
            scores.update({name: float(hit) for (name, _, _), hit in zip(chunk, right.tolist(), strict=True)})
        known = [value for value in scores.values() if value is not None]
        return {"accuracy": sum(known) / len(known) if known else None, "cases": scores}


def _plain(value: Any) -> Tensor:
    """A tensor without MONAI's meta data, which would follow the features into statistics and messages."""
    return convert_to_tensor(value, track_meta=False)


def _plain_batch(batch: Any) -> Sample:
    return {key: _plain(batch[key]) for key in (Keys.IMAGE, Keys.LABEL) if key in batch}


def make_task(config: RunConfig, *, normalised: bool) -> Task:
    """The task that a configuration names.

    Args:
        config: the run.
        normalised: whether a method normalises the intensities. Where none does, each volume is scaled to
            [0, 1] by itself and photographs are divided by 255, as the papers' plain FedAvg sees its images.
    """
    scale = config.intensity == "scale" or not normalised
    task: Task
    if config.task == "classification":
        task = ClassificationTask(config.classes, scale, config.image_size)
    else:
        task = SegmentationTask(config.num_classes, "scale" if scale else "raw", image_size=config.image_size)
    task.augments = config.augmentation
    return task
