"""Classification of photographs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from monai.transforms import CastToTyped, Lambdad, Transform
from monai.utils import CommonKeys as Keys
from torch import Tensor, nn

from medfedaug.config.run import RunConfig
from medfedaug.data.base import Case, SiteFolder
from medfedaug.data.checks import check_known_classes
from medfedaug.data.preparation.preparation import Preparation, resize_in_plane
from medfedaug.errors import ConfigError, withheld
from medfedaug.metrics.base import SiteScores
from medfedaug.metrics.classification import ClassifiedImages
from medfedaug.metrics.registry import METRICS, metric_names
from medfedaug.metrics.significance import interval_ends
from medfedaug.tasks.base import EvaluationCase, Pipeline, Prediction, Sample, Task, device_of, stack
from medfedaug.tasks.losses import Loss, build_loss


class _DivideBy255(Transform):
    """`ScaleIntensityRanged` bit for bit, whose tensors with metadata cost more than the division."""

    def __call__(self, data: dict[str, Any]) -> dict[str, Any]:
        return {**data, Keys.IMAGE: data[Keys.IMAGE] / 255}


class ClassificationTask(Task):
    """Classification of photographs: top-1 accuracy, balanced accuracy, AUC.

    Args:
        classes: the federation's classes; a site may lack some.
        scale: divides pixels by 255; otherwise they stay 0 to 255 for a method to normalise.
        image_size: pixels in both directions of resized images; not needed if all have one size.
        loss: by default cross-entropy.
    """

    metrics = metric_names("classification")
    metric = metrics[0]
    dense = False
    left_to_right = 1

    def __init__(
        self, classes: Sequence[str], scale: bool, image_size: int | None = None, loss: Loss | None = None
    ) -> None:
        self.classes, self.scale, self.image_size = tuple(classes), scale, image_size
        self.intensity = "scale" if scale else "raw"
        self.num_classes = len(self.classes)
        self.criterion = loss or build_loss("classification", self.num_classes)
        self.preparation = Preparation(image_size=image_size)

    @classmethod
    def from_config(cls, config: RunConfig, intensity: str) -> ClassificationTask:
        loss = build_loss("classification", config.num_classes, config.loss, config.loss_args)
        return cls(config.classes, intensity == "scale", config.image_size, loss)

    @property
    def scored_classes(self) -> tuple[str, ...]:
        return self.classes

    def check_site(self, site: SiteFolder) -> None:
        super().check_site(site)
        check_known_classes(site, self.classes)

    def prepared(self, site: SiteFolder, case: Case) -> dict[str, Tensor]:
        """Return one item: uint8 (1, C, H, W), a quarter of the memory of floats; label (1,)."""
        stored = site.load_image(case)
        inputs = resize_in_plane(stored / 255 if self.scale else stored, self.image_size)
        label = torch.tensor([self.classes.index(str(case.label))])
        image = resize_in_plane(stored, self.image_size)
        return {Keys.IMAGE: image[None], Keys.LABEL: label, **self.preparation.of_whole(inputs)}

    @property
    def key(self) -> str:
        """Size and classes, whose places are the labels; pixels are kept as stored."""
        return f"{self.scale} {self.preparation!r} {self.classes!r}"

    def evaluation_case(self, site: SiteFolder, case: Case, labelled: bool = True) -> EvaluationCase:
        """Load a photograph: uint8 (C, H, W), label ()."""
        # Resized once here, and not in every application of `transforms`.
        image = resize_in_plane(site.load_image(case), self.image_size)
        label = torch.tensor(self.classes.index(str(case.label))) if labelled else torch.empty(0)
        return EvaluationCase(case.name, image, label, owner=case.owner)

    def predict_case(
        self,
        network: nn.Module,
        case: EvaluationCase,
        transform: Pipeline,
        batch_size: int = 16,
        probabilities: bool = False,
    ) -> Prediction:
        ((_, logits),) = self.outputs(network, [case], transform)
        return Prediction(logits.argmax(), logits.float().softmax(dim=0) if probabilities else None)

    @torch.no_grad()
    def outputs(
        self, network: nn.Module, cases: Iterable[EvaluationCase], transform: Pipeline, batch_size: int = 16
    ) -> Iterator[tuple[EvaluationCase, Tensor]]:
        """Yield the logits of photographs, (K,) each, on the CPU."""
        remaining = iter(cases)
        while chunk := list(islice(remaining, batch_size)):
            batch = self.collate(
                [
                    {Keys.IMAGE: transform({Keys.IMAGE: case.image})[Keys.IMAGE], Keys.LABEL: case.label}
                    for case in chunk
                ]
            )
            outputs = network(batch[Keys.IMAGE].to(device_of(network)))
            yield from zip(chunk, outputs.cpu(), strict=True)

    def transforms(self) -> Sequence[Transform]:
        """Return resizing, with an image size, and conversion to floating point."""
        convert = _DivideBy255() if self.scale else CastToTyped(keys=Keys.IMAGE, dtype=torch.float32)
        if not self.image_size:
            return [convert]
        return [Lambdad(keys=Keys.IMAGE, func=partial(resize_in_plane, size=self.image_size)), convert]

    def collate(self, samples: list[Sample]) -> Sample:
        """Stack images, which must have one size."""
        sizes = {tuple(sample[Keys.IMAGE].shape[1:]) for sample in samples}
        if len(sizes) > 1:
            first, second = sorted(sizes)[:2]
            sizes_of_few = withheld(f"{first} and {second}")
            raise ConfigError(f"images of different size, {sizes_of_few}: choose --image-size")
        return stack(samples)

    def scores(self, outputs: Iterable[tuple[EvaluationCase, Tensor]], full: bool) -> dict[str, Any]:
        pairs = list(outputs)
        if not pairs:
            return {self.metric: None, "cases": {}}
        images = ClassifiedImages(
            torch.stack([logits for _, logits in pairs]),
            torch.stack([case.label for case, _ in pairs]),
            self.classes,
            [case.name for case, _ in pairs],
            [case.owner or case.name for case, _ in pairs],
        )
        scores = image_scores(images, self.metrics if full else self.metrics[:1])
        return scores if full else {self.metric: scores[self.metric], "cases": scores["cases"]}


def image_scores(images: ClassifiedImages, metrics: Sequence[str]) -> dict[str, Any]:
    """Score the images of a site.

    Returns:
        The scores as `medfedaug.tasks.base.Task.evaluate`; by class also the ends of the 95% intervals.
    """
    scores: dict[str, SiteScores] = {name: METRICS[name].scores(images) for name in metrics}
    classes: dict[str, dict[str, Any]] = {name: {} for name in images.classes}
    by_class = {name: site_scores for name, site_scores in scores.items() if METRICS[name].by_class}
    for label, entry in classes.items():
        entry |= {name: site_scores.classes.get(label) for name, site_scores in by_class.items()}
        for name, site_scores in by_class.items():
            entry |= interval_ends(METRICS[name], site_scores.values.get(label, ()))
    first, *others = metrics
    by_case = {name: scores[name].cases for name in others if scores[name].cases is not None}
    return {
        **{name: site_scores.score for name, site_scores in scores.items()},
        "cases": scores[first].cases,
        "classes": classes,
        **({"case_metrics": by_case} if by_case else {}),
    }
