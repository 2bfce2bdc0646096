"""What is learned: samples, loss, inference and metric of a task."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from monai.data.utils import pad_list_data_collate
from monai.inferers import SliceInferer
from monai.losses import DiceCELoss
from monai.metrics import DiceMetric
from monai.networks.utils import one_hot
from monai.transforms import DivisiblePad, DivisiblePadd
from torch import Tensor, nn

from medfedaug.config import RunConfig
from medfedaug.data.sites import SiteFolder
from medfedaug.methods.base import IMAGE, LABEL

__all__ = ["SegmentationTask", "make_task"]

Sample = dict[str, Tensor]


class SegmentationTask:
    """Slice-wise segmentation of volumes: trained on slices, scored on patients.

    Training takes the slices with foreground, along the last axis of a volume, as the papers do; evaluation
    takes all slices. The loss is MONAI's Dice (foreground classes, over the batch) plus cross-entropy; the
    metric is Dice without background, per patient volume. A patient without any foreground has no Dice and
    does not enter the mean.

    Args:
        num_classes: classes, background included.
        intensity: as in `medfedaug.config.RunConfig`.
        divisor: in-plane sizes are padded to multiples of it, as a U-Net with four poolings needs.
    """

    metric = "dice"

    def __init__(self, num_classes: int, intensity: str = "raw", divisor: int = 16) -> None:
        self.num_classes, self.intensity, self.divisor = num_classes, intensity, divisor
        self.criterion = DiceCELoss(include_background=False, to_onehot_y=True, softmax=True, batch=True)

    def training_samples(self, site: SiteFolder) -> list[Sample]:
        """All training slices with foreground: image (C, H, W) and label (1, H, W)."""
        samples: list[Sample] = []
        for case in site.cases["training"]:
            image, label = site.load_case(case, self.intensity)
            for index in label.flatten(0, 2).any(dim=0).nonzero().flatten().tolist():
                # Cloned, or one slice would keep its whole volume in memory.
                samples.append({IMAGE: image[..., index].clone(), LABEL: label[..., index].clone()})
        return samples

    def evaluation_cases(self, site: SiteFolder, split: str) -> Iterable[tuple[str, Tensor, Tensor]]:
        """The volumes of a split: name, image (C, H, W, D) and label (1, H, W, D), one at a time."""
        for case in site.cases[split]:
            yield (case.name, *site.load_case(case, self.intensity))

    def collate(self, samples: list[Sample]) -> Sample:
        """Pad to a common size that the network takes, and stack."""
        pad = DivisiblePadd(keys=(IMAGE, LABEL), k=self.divisor, allow_missing_keys=True)
        sizes = {tuple(sample[IMAGE].shape[1:]) for sample in samples}
        if all(n % self.divisor == 0 for size in sizes for n in size):
            if len(sizes) == 1:
                return {
                    key: torch.stack([torch.as_tensor(s[key]) for s in samples]) for key in (IMAGE, LABEL)
                }
            return dict(pad_list_data_collate(samples))
        return dict(pad_list_data_collate([pad(sample) for sample in samples]))

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Dice plus cross-entropy of logits (B, K, H, W) and labels (B, 1, H, W)."""
        return self.criterion(outputs, targets)

    @torch.no_grad()
    def evaluate(
        self,
        network: nn.Module,
        cases: Iterable[tuple[str, Tensor, Tensor]],
        transform: Callable[[dict[str, Any]], dict[str, Any]],
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
            predicted = self.predict(network, transform({IMAGE: image})[IMAGE], device, batch_size)
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
        height, width = image.shape[1:3]
        padded = DivisiblePad(k=(self.divisor, self.divisor, 1), method="end")(torch.as_tensor(image))
        infer = SliceInferer(roi_size=tuple(padded.shape[1:3]), spatial_dim=2, sw_batch_size=batch_size)
        logits = infer(torch.as_tensor(padded)[None].to(device), network)
        assert isinstance(logits, Tensor)
        return logits[0, :, :height, :width].argmax(dim=0, keepdim=True)


def make_task(config: RunConfig, *, normalised: bool) -> SegmentationTask:
    """The task that a configuration names.

    Args:
        config: the run.
        normalised: whether a method normalises the intensities. Where none does, each volume is scaled to
            [0, 1] by itself, as the papers' plain FedAvg sees its images.
    """
    return SegmentationTask(config.num_classes, config.intensity if normalised else "scale")
