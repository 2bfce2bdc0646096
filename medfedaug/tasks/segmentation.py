"""Segmentation of volumes, and of images as volumes of one slice."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from monai.data.utils import pad_list_data_collate
from monai.inferers import SliceInferer, SlidingWindowInferer
from monai.transforms import DivisiblePadd, SpatialPadd
from monai.utils import CommonKeys as Keys
from torch import Tensor, nn

from medfedaug.config.plan import Plan
from medfedaug.config.run import RunConfig
from medfedaug.data.base import Case, SiteFolder
from medfedaug.data.checks import check_classes
from medfedaug.data.preparation.cache import StoredCase
from medfedaug.data.preparation.preparation import Placement, Preparation, resize_in_plane
from medfedaug.data.volumes import VolumeFolder
from medfedaug.errors import DataError
from medfedaug.functional.soft_dice_confidence import soft_dice_confidence
from medfedaug.metrics.registry import metric_names
from medfedaug.metrics.segmentation import LabelMapScores
from medfedaug.tasks.base import (
    EvaluationCase,
    Pipeline,
    Prediction,
    Sample,
    Task,
    device_of,
    plain_tensor,
    stack,
)
from medfedaug.tasks.losses import Loss, build_loss
from medfedaug.tasks.partial_loss import PartialLoss

# Of each class and item; enough to reach any part of a lesion, in a few kilobytes.
_CANDIDATES = 1000


class SegmentationTask(Task):
    """Segmentation of volumes: trained on slices, volumes, or patches of them, and scored on patients.

    With a plan of two spatial dimensions, training takes the slices with foreground, along the last axis of a
    volume, as in the papers; evaluation takes all slices. With three, training takes volumes, or patches.
    The network's output is resampled to the grid of the file and scored there. The metric is Dice without
    background, per patient volume. A patient without any foreground has no Dice and does not enter the mean.

    Args:
        num_classes: classes, background included.
        intensity: ``"raw"``: volumes as stored; ``"scale"``: each scaled to [0, 1].
        divisor: without a patch size, images are padded to multiples of it, as a U-Net with four poolings
            needs.
        image_size: pixels in both directions of resized slices for the network; its logits are resized back
            to the volume's grid for scoring. ``None`` does not resize.
        classes: names in the order of their labels, for sites to match; ``None`` for any.
        surface_tolerance: see `medfedaug.config.run.RunConfig`.
        loss: by default Dice of the foreground classes, over the batch, plus cross-entropy.
        plan: preparation and patches of volumes.
        partial_loss: see `medfedaug.config.run.RunConfig`.
    """

    metrics = metric_names("segmentation")
    metric = metrics[0]
    dense = True

    def __init__(
        self,
        num_classes: int,
        intensity: str = "raw",
        divisor: int = 16,
        image_size: int | None = None,
        classes: Sequence[str] | None = None,
        surface_tolerance: float = 2.0,
        loss: Loss | None = None,
        plan: Plan | None = None,
        partial_loss: str = "marginal",
    ) -> None:
        self.classes = classes
        self.num_classes, self.intensity, self.divisor = num_classes, intensity, divisor
        self.image_size, self.surface_tolerance = image_size, surface_tolerance
        self.criterion = self._of_all_classes = loss or build_loss("segmentation", num_classes)
        self.plan, self.partial_loss = plan or Plan(), partial_loss
        self.left_to_right = self.plan.left_to_right
        self.preparation = Preparation(self.plan, image_size)

    @classmethod
    def from_config(cls, config: RunConfig, intensity: str) -> SegmentationTask:
        return cls(
            config.num_classes,
            intensity,
            image_size=config.image_size,
            classes=config.classes,
            surface_tolerance=config.surface_tolerance,
            loss=build_loss("segmentation", config.num_classes, config.loss, config.loss_args),
            plan=config.plan,
            partial_loss=config.partial_loss,
        )

    @property
    def scored_classes(self) -> tuple[str, ...]:
        return self._names[1:]

    @property
    def _names(self) -> tuple[str, ...]:
        return tuple(self.classes or map(str, range(self.num_classes)))

    def check_site(self, site: SiteFolder) -> None:
        """Check that the site fits the plan, and has the federation's classes in their order."""
        super().check_site(site)
        assert isinstance(site, VolumeFolder)
        plan = self.plan
        if site.has_photographs and (plan.spatial_dims == 3 or plan.spacing or plan.orientation):
            problem = "its photographs have neither depth nor millimetres, and the plan is for volumes"
            hint = "Leave out spatial_dims 3, spacing and orientation."
            raise site.error(problem, site.path, hint=hint)
        if self.classes is not None:
            check_classes(site, self.classes, "the federation")
        self.annotation, self.criterion = site.annotation, self._of_all_classes
        if site.annotation is not None:
            self.criterion = PartialLoss(self._of_all_classes, site.annotation, self.partial_loss)

    @property
    def key(self) -> str:
        """Intensity and preparation; the network sees slices or volumes."""
        return f"{self.intensity} {self.preparation!r} {self.plan.spatial_dims} {bool(self.plan.patch_size)}"

    @property
    def samples_per_item(self) -> int:
        """Patches of a volume; a slice gives one sample."""
        return self.plan.samples_per_item

    @property
    def cuts(self) -> bool:
        return self.plan.patch_size is not None

    def prepared(self, site: SiteFolder, case: Case) -> dict[str, Tensor]:
        """Return the volume, (1, C, X, Y, Z), or its slices with foreground, (N, C, X, Y), and labels."""
        image, label, placement = self._load(site, case)
        inputs = self.preparation.image(image, placement)
        if self.plan.spatial_dims == 3:
            images, labels = inputs[None], self.preparation.label(label, placement)[None]
        else:
            # Slices are chosen before they are resized: a small lesion may be gone then.
            moved = placement.forward(label, label=True) if placement else label
            annotated = self._classes_of(moved[None])[0] if isinstance(case.label, Path) else moved
            slices = annotated.flatten(0, 2).any(dim=0).nonzero().flatten()
            labels = resize_in_plane(moved[..., slices], self.image_size, "nearest-exact").permute(3, 0, 1, 2)
            images = inputs[..., slices].permute(3, 0, 1, 2)
        prepared: dict[str, Tensor] = {Keys.IMAGE: images.contiguous(), Keys.LABEL: labels.contiguous()}
        prepared.update(self.preparation.of_whole(inputs))
        if self.plan.patch_size is not None:
            known = None if self.annotation is None else self.annotation.decode(labels).known
            prepared["centres"] = patch_centres(self._classes_of(labels), known)
        return prepared

    def _classes_of(self, labels: Tensor) -> Tensor:
        """Return the classes of label maps, (N, 1, *spatial), with 0 for unknown voxels."""
        return labels if self.annotation is None else self.annotation.decode(labels).labels

    def _load(self, site: SiteFolder, case: Case) -> tuple[Tensor, Tensor, Placement | None]:
        assert isinstance(site, VolumeFolder)
        image, label = site.load_target(case, self.intensity)
        return image, label, self._placement(site, case, image)

    def _placement(self, site: VolumeFolder, case: Case, image: Tensor) -> Placement | None:
        if self.plan.spatial_dims == 3 and 1 in image.shape[1:]:
            problem = "is a single slice, and the plan is for volumes"
            raise site.error(problem, case.image, hint="Use a plan with spatial_dims 2.")
        return site.placement(case, image, self.preparation)

    def window(self, stored: StoredCase, item: int, random: np.random.RandomState) -> tuple[slice, ...]:
        """Draw a patch (`medfedaug.tasks.segmentation.patch_window`), if the plan has a patch size."""
        if not self.cuts:
            return ()
        candidates = stored.read("centres")
        size = stored.shape(Keys.IMAGE)[2:]
        return patch_window(size, candidates[candidates[:, 0] == item], self.plan, random)

    def nothing_to_train(self, site: SiteFolder) -> DataError:
        problem = "no training slice has any foreground"
        return site.error(problem, site.path, hint="Check the label maps.")

    def evaluation_case(self, site: SiteFolder, case: Case, labelled: bool = True) -> EvaluationCase:
        """Load a volume: image (C, X, Y, Z), and label (1, X, Y, Z) on the grid of its file."""
        assert isinstance(site, VolumeFolder)
        if labelled:
            image, label, placement = self._load(site, case)
        else:
            image, label = site.load_image(case, self.intensity), torch.empty(0)
            placement = self._placement(site, case, image)
        image = self.preparation.on_grid(image, placement)
        return EvaluationCase(case.name, image, label, site.affine(case), placement, case.owner)

    def collate(self, samples: list[Sample]) -> Sample:
        """Pad to a common size that the network takes, and stack."""
        sizes = {tuple(sample[Keys.IMAGE].shape[1:]) for sample in samples}
        patch = self.plan.patch_size
        fits = patch in sizes if patch else all(n % self.divisor == 0 for size in sizes for n in size)
        if fits and len(sizes) == 1:
            return stack(samples)
        keys: tuple[str, ...] = (Keys.IMAGE, Keys.LABEL)
        pad: Any = DivisiblePadd(keys=keys, k=self.divisor, allow_missing_keys=True)
        if patch:
            pad = SpatialPadd(keys=keys, spatial_size=patch, allow_missing_keys=True)
        batch = pad_list_data_collate(samples if fits else [pad(sample) for sample in samples])
        return {key: plain_tensor(batch[key]) for key in keys if key in batch}

    def scores(self, outputs: Iterable[tuple[EvaluationCase, Tensor]], full: bool) -> dict[str, Any]:
        """Score the volumes one at a time; see `medfedaug.metrics.segmentation.LabelMapScores`."""
        scores = LabelMapScores(self._names, self.surface_tolerance, self.metrics, full=full)
        for case, predicted in outputs:
            label, annotated = case.label, None
            if self.annotation is not None:
                truth, known, classes = self.annotation.decode(label[None])
                label, predicted = truth[0], predicted * known[0].to(predicted.device)
                annotated = classes[0, 1:].tolist()
            scores.add(case.name, predicted, label, case.affine, case.owner, annotated)
        return scores.result()

    def outputs(
        self, network: nn.Module, cases: Iterable[EvaluationCase], transform: Pipeline, batch_size: int = 16
    ) -> Iterator[tuple[EvaluationCase, Tensor]]:
        """Yield the label maps of volumes, (1, X, Y, Z) each, on the grid of their files."""
        for case in cases:
            logits = self._case_logits(network, case, transform, batch_size)
            yield case, _label_map(logits, case.placement)

    def predict_case(
        self,
        network: nn.Module,
        case: EvaluationCase,
        transform: Pipeline,
        batch_size: int = 16,
        probabilities: bool = False,
    ) -> Prediction:
        place = case.placement
        logits = self._case_logits(network, case, transform, batch_size)
        label = _label_map(logits, place).cpu()
        confidence = soft_dice_confidence(logits, logits.argmax(dim=0)).cpu()
        if not probabilities:
            return Prediction(label, confidence=confidence)
        shares = logits.float().softmax(dim=0).cpu()
        if place is not None:
            shares = place.put_back(shares)
        return Prediction(label, shares, confidence)

    def _case_logits(
        self, network: nn.Module, case: EvaluationCase, transform: Pipeline, batch_size: int
    ) -> Tensor:
        # Resized first, as in training: the effect of a method may depend on the size of an image.
        image = transform({Keys.IMAGE: resize_in_plane(case.image, self.image_size)})[Keys.IMAGE]
        return self.logits(network, image, batch_size, case.placement, case.image.shape[1:3])

    @torch.no_grad()
    def logits(
        self,
        network: nn.Module,
        image: Tensor,
        batch_size: int = 16,
        placement: Placement | None = None,
        plane: Sequence[int] | None = None,
    ) -> Tensor:
        """Return the network's output with the voxels of the file, (K, X, Y, Z), along the prepared axes.

        ``image`` is the prepared volume, (C, X, Y, Z), after the transforms of the methods; ``batch_size``
        counts slices or windows. ``placement`` is the place of the prepared volume in the grid of the file,
        if it was moved; ``plane`` are the pixels of its slices, if ``image`` has the size `image_size`.
        """
        plain = plain_tensor(image).to(device_of(network))
        if self.plan.spatial_dims == 3:
            logits = self._infer_volume(network, plain, batch_size)
        else:
            logits = self._infer_slices(network, plain, batch_size, plane or plain.shape[1:3])
        return logits if placement is None else placement.resized_back(logits)

    def _infer_volume(self, network: nn.Module, image: Tensor, batch_size: int) -> Tensor:
        size = image.shape[1:]
        if self.plan.patch_size is not None:
            infer = self._windows(SlidingWindowInferer, self.plan.patch_size, batch_size)
            return _logits(infer(image[None], network))
        padded = _padded(image, (self.divisor,) * 3)
        return _logits(network(padded[None]))[:, : size[0], : size[1], : size[2]]

    def _infer_slices(
        self, network: nn.Module, image: Tensor, batch_size: int, plane: Sequence[int]
    ) -> Tensor:
        """Compute logits, (K, X, Y, Z), slice by slice along the last axis."""
        plain = resize_in_plane(image, self.image_size)
        rows, columns = plain.shape[1:3]
        if self.plan.patch_size is not None:
            infer = self._windows(SliceInferer, self.plan.patch_size, batch_size, spatial_dim=2)
            logits = _logits(infer(plain[None], network))
        else:
            padded = _padded(plain, (self.divisor, self.divisor, 1))
            whole = SliceInferer(roi_size=tuple(padded.shape[1:3]), spatial_dim=2, sw_batch_size=batch_size)
            logits = _logits(whole(padded[None], network))[:, :rows, :columns]
        if self.image_size:
            slices = nn.functional.interpolate(logits.permute(3, 0, 1, 2), tuple(plane), mode="bilinear")
            logits = slices.permute(1, 2, 3, 0)
        return logits

    def _windows(self, kind: Any, size: tuple[int, ...], batch_size: int, **more: Any) -> Any:
        """Build an inferer whose windows overlap, and count less towards their edges."""
        overlap = self.plan.overlap
        return kind(roi_size=size, sw_batch_size=batch_size, overlap=overlap, mode="gaussian", **more)


def _padded(image: Tensor, factors: Sequence[int]) -> Tensor:
    """Pad with zeros at the end of each axis, to a multiple; MONAI's transform would track the image."""
    ends = [end for n, factor in zip(image.shape[1:], factors, strict=True) for end in (-n % factor, 0)]
    return nn.functional.pad(image, ends[::-1])


def _label_map(logits: Tensor, placement: Placement | None) -> Tensor:
    label = logits.max(dim=0, keepdim=True).indices  # on a CPU in a tenth of the time of `argmax`
    return label if placement is None else placement.put_back(label)


def _logits(output: Any) -> Tensor:
    assert isinstance(output, Tensor)
    return output[0]


def patch_centres(labels: Tensor, known: Tensor | None = None) -> Tensor:
    """Choose candidate centres of patches, at most 1,000 of each class and item, evenly from all voxels.

    The background counts as a class of an item with known and unknown voxels.

    Args:
        labels: label maps, (N, 1, *spatial), 0 for an unknown class.
        known: whether the class is known, of the same shape; ``None`` for always.

    Returns:
        Rows of item, class and position, (M, 2 + spatial dimensions), int32.
    """
    rows = [torch.zeros(0, labels.ndim, dtype=torch.int32)]
    for item, label in enumerate(labels[:, 0]):
        least, inside = 1, None if known is None else known[item, 0]
        if inside is not None and bool(inside.any()) and not bool(inside.all()):
            least, label = 0, label.long().masked_fill(~inside, -1)
        for value in torch.unique(label[label >= least]).tolist():
            voxels = (label == value).nonzero()
            places = torch.linspace(0, len(voxels) - 1, min(len(voxels), _CANDIDATES)).long()
            # Above 2^24, float32 may round the last place beyond the end.
            candidates = voxels[places.clamp(max=len(voxels) - 1)]
            head = torch.tensor([item, value]).expand(len(candidates), 2)
            rows.append(torch.cat([head, candidates], dim=1).int())
    return torch.cat(rows)


def patch_window(
    size: Sequence[int], candidates: Tensor, plan: Plan, random: np.random.RandomState
) -> tuple[slice, ...]:
    """Draw the window of a patch.

    With probability `Plan.foreground` its centre is a foreground voxel, of a class that is drawn first.
    Otherwise, and without foreground, its place is uniform, or on known background where some voxels are
    unknown, since a patch of unknown voxels teaches nothing. A patch never leaves the volume, and covers an
    axis along which the volume is smaller. ``candidates`` are the rows of `patch_centres` of one item.
    """
    assert plan.patch_size is not None
    lengths = [min(n, patch) for n, patch in zip(size, plan.patch_size, strict=True)]
    room = [n - length for n, length in zip(size, lengths, strict=True)]
    # Always drawn, so that later draws do not depend on the label map.
    share, which, where = random.uniform(), random.uniform(), random.uniform(size=len(size))
    foreground = candidates[candidates[:, 1] > 0]
    of_class = candidates[candidates[:, 1] == 0]
    if share < plan.foreground and len(foreground):
        classes = foreground[:, 1].unique()
        of_class = foreground[foreground[:, 1] == classes[int(which * len(classes))]]
    if len(of_class):
        centre = of_class[int(where[0] * len(of_class)), 2:].tolist()
        starts = [
            min(max(c - length // 2, 0), most) for c, length, most in zip(centre, lengths, room, strict=True)
        ]
    else:
        starts = [int(share * (most + 1)) for share, most in zip(where, room, strict=True)]
    return tuple(slice(start, start + length) for start, length in zip(starts, lengths, strict=True))
