"""`BundleTask`: samples, loss, inference and metric of a Bundle."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from itertools import groupby, islice
from typing import Any

import monai.losses
import numpy as np
import torch
from monai.data import decollate_batch, list_data_collate
from monai.inferers import SimpleInferer
from monai.transforms import (
    Compose,
    Orientationd,
    Randomizable,
    RandomizableTrait,
    ResampleToMatchd,
    Spacingd,
    SpatialResampled,
    Transform,
    apply_transform,
)
from monai.utils import CommonKeys as Keys
from monai.utils import convert_to_tensor, ensure_tuple
from torch import Tensor, nn

from medfedaug.config.run import RunConfig
from medfedaug.data.base import Case, SiteFolder
from medfedaug.data.checks import check_classes, check_files_alone, check_known_classes
from medfedaug.data.preparation.preparation import Preparation
from medfedaug.errors import DataError, translated
from medfedaug.tasks.base import EvaluationCase, Pipeline, Sample, Task, device_of, plain_tensor
from medfedaug.tasks.bundle.parser import BundleConfiguration, BundleMetrics, reason_of
from medfedaug.tasks.losses import Loss

_AT_LEAST = 2**32 - 1
_CROPS, _INTENSITY = "monai.transforms.croppad", "monai.transforms.intensity"
_LOCATED = (Orientationd, ResampleToMatchd, Spacingd, SpatialResampled)


class BundleTask(Task):
    """Task of a Bundle: its transforms, loss, inferer, post-processing and metrics.

    The Bundle's transforms get the files of a case, under ``image`` (a path, or a list of them) and ``label``
    (the path of the label map, or the number of the class). Transforms before the first random one are
    applied once, and statistics are of their output. ``label`` may be anything that the Bundle's loss takes.
    """

    left_to_right = 0
    methods_first = True

    def __init__(self, configuration: BundleConfiguration, config: RunConfig) -> None:
        self.configuration = configuration
        self.classes, self.num_classes = config.classes, config.num_classes
        self.dense = config.task == "segmentation"
        trainer, evaluator = configuration.trainer, configuration.evaluator
        transforms = configuration.find(trainer, "train_data_loader", "dataset", "transform")
        self.parts = Parts(configuration.make(transforms))
        if self.parts.located:  # MONAI would take the identity for the affine
            raise configuration.problem(
                transforms,
                f"{self.parts.located} needs to know where voxels lie, which is not kept from the first "
                "random transform, or the first function, on: put it before",
            )
        identifier = configuration.find(evaluator, "val_data_loader", "dataset", "transform")
        validation = Parts(configuration.make(identifier))
        if validation.drawn:
            raise configuration.problem(identifier, "has random transforms")
        self.evaluation = validation.once
        inferer = self._part(trainer, "inferer")
        if inferer is not None and type(inferer) is not SimpleInferer:
            reason = f"is {type(inferer).__name__}; training calls the network itself"
            raise configuration.problem(f"{trainer}#inferer", reason)
        self.inferer = self._part(evaluator, "inferer") or SimpleInferer()
        self.postprocessing = self._part(evaluator, "postprocessing") or Compose([])
        self._collate = self._part(trainer, "train_data_loader", "collate_fn") or list_data_collate
        self.criterion = _BundleLoss(
            configuration.bundle.name,
            self.num_classes,
            configuration.make(configuration.find(trainer, "loss_function")),
            self.dense,
        )
        self.metric_scores = BundleMetrics(configuration, "patients" if self.dense else "images")
        self.metrics = self.metric_scores.names
        self.metric = self.metrics[0]
        self.preparation = Preparation(config.plan)

    def _part(self, *path: str) -> Any:
        """Make a part that a Bundle may leave out."""
        identifier = self.configuration.find(*path, required=False)
        return self.configuration.make(identifier) if identifier else None

    @property
    def key(self) -> str:
        """The Bundle by its content, and the classes, whose places are the labels of photographs."""
        bundle = self.configuration.bundle
        return f"bundle {bundle.name} {bundle.hash} {self.classes!r}"

    @property
    def cuts(self) -> bool:
        return self.parts.crops

    def check_site(self, site: SiteFolder) -> None:
        """Check that a Bundle can read the site's files, and that it has the federation's classes."""
        super().check_site(site)
        if site.partial:
            raise site.error(
                "has classes or voxels without annotation, which the transforms of a Bundle do not support",
                hint="Train its network and loss without --bundle, which supports missing annotations: "
                f"--network CLASS.PATH{self._loss_option}; or leave out 'labelled' and 'ignore' if all is "
                "annotated.",
            )
        if self.dense:
            check_classes(site, self.classes, "the federation")
        else:
            check_known_classes(site, self.classes)
        check_files_alone(site, "a Bundle")

    @property
    def _loss_option(self) -> str:
        """The option for the Bundle's loss in a run without the Bundle, if it is one of MONAI's."""
        name = type(self.criterion.labels).__name__
        return f" --loss monai.losses.{name}" if hasattr(monai.losses, name) else ""

    def _applied(
        self, transforms: Compose, site: SiteFolder, case: Case, purpose: str
    ) -> list[dict[str, Any]]:
        """Apply transforms to a case's files, and return one sample, or several."""
        image = str(case.image) if not case.others else [str(path) for path in case.files]
        label = str(case.label) if self.dense else self.classes.index(str(case.label))

        def named(error: Exception) -> DataError:
            bundle, reason = self.configuration.bundle.name, reason_of(error)
            problem = f"the {purpose} transforms of the Bundle {bundle} fail ({reason})"
            return site.error(problem, case.image)

        with translated(Exception, to=named):  # of a transform, or for a key that it does not give
            result: Any = transforms({Keys.IMAGE: image, Keys.LABEL: label})
            items = list(result) if isinstance(result, list | tuple) else [result]
            return [plain_sample({**item, Keys.IMAGE: _floats(item[Keys.IMAGE])}) for item in items]

    def prepared(self, site: SiteFolder, case: Case) -> dict[str, Tensor]:
        """Apply the deterministic transforms to a case, and return it as one item with its moments."""
        items = self._applied(self.parts.once, site, case, "training")
        keys: tuple[str, ...] = (Keys.IMAGE, Keys.LABEL)
        stacked = {key: torch.stack([item[key] for item in items]) for key in keys}
        return {**stacked, **self.preparation.of_whole(items[0][Keys.IMAGE])}

    def moments(self, site: SiteFolder, case: Case, over: str = "image") -> dict[str, Tensor]:
        """Compute the moments of the image after the validation transforms."""
        (first, *_) = self._applied(self.evaluation, site, case, "validation")
        return self.preparation.moments(first[Keys.IMAGE], over)

    def fixed(self, sample: Sample, random: np.random.RandomState) -> Any:
        """Return the cut sample without augmentation; a list if a case gives several."""
        if not self.parts.cutting:
            return sample
        cutting = Compose(self.parts.cutting)
        cutting.set_random_state(seed=int(random.randint(_AT_LEAST, dtype="uint32")))
        return plain_sample(cutting(dict(sample)))

    def augmentation(self) -> BundleAugmentation | None:
        """Return the random transforms, and all after them."""
        return BundleAugmentation(self.parts.drawn) if self.parts.drawn else None

    def collate(self, samples: list[Any]) -> Sample:
        """Make a batch by the Bundle's ``collate_fn``, or MONAI's `list_data_collate`."""
        try:
            batch = self._collate(samples)
        except (RuntimeError, TypeError, ValueError) as error:
            flat = [item for sample in samples for item in (sample if isinstance(sample, list) else [sample])]
            sizes = sorted({tuple(item[Keys.IMAGE].shape[1:]) for item in flat})
            raise self.configuration.problem(
                self.configuration.find(self.configuration.trainer, "train_data_loader"),
                f"samples cannot be put into a batch (sizes {', '.join(map(str, sizes[:3]))}): cut or pad "
                "them to one size, or give a collate_fn",
            ) from error
        return {key: plain_tensor(batch[key]) for key in (Keys.IMAGE, Keys.LABEL)}

    def evaluation_case(self, site: SiteFolder, case: Case, labelled: bool = True) -> EvaluationCase:
        """Load a case by the validation transforms, always with its label."""
        item = self._applied(self.evaluation, site, case, "validation")[0]
        return EvaluationCase(case.name, item[Keys.IMAGE], item[Keys.LABEL], owner=case.owner)

    def probabilities(self, targets: Tensor) -> Tensor:
        """Return numbers of classes as one-hot, (B, K, ...)."""
        if targets.ndim != 1 and targets.shape[1] != 1:
            raise self.configuration.problem("label", "a method needs targets that are numbers of classes")
        return super().probabilities(targets if self.dense or targets.ndim == 1 else targets[:, 0])

    @torch.no_grad()
    def outputs(
        self, network: nn.Module, cases: Iterable[EvaluationCase], transform: Pipeline, batch_size: int = 16
    ) -> Iterator[tuple[EvaluationCase, Tensor]]:
        r"""Yield the output of the Bundle's inferer for each case, (K, \*spatial) or (K,), on the CPU."""
        remaining = iter(cases)
        while chunk := list(islice(remaining, 1 if self.dense else batch_size)):
            images = [plain_tensor(transform({Keys.IMAGE: case.image})[Keys.IMAGE]) for case in chunk]
            for _, same in groupby(zip(chunk, images, strict=True), lambda pair: pair[1].shape):
                group = list(same)
                inputs = torch.stack([image for _, image in group]).to(device_of(network))
                output = self.inferer(inputs, network)
                if not isinstance(output, Tensor):
                    raise self.configuration.problem("inferer", f"gives {type(output).__name__}, no tensor")
                yield from zip([case for case, _ in group], output.cpu(), strict=True)

    def scores(self, outputs: Iterable[tuple[EvaluationCase, Tensor]], full: bool) -> dict[str, Any]:
        """Score by the Bundle's key metric; with ``full`` also by its additional metrics."""
        return self.metric_scores.score(
            ((case.name, self._processed(case, output)) for case, output in outputs), full
        )

    def _processed(self, case: EvaluationCase, output: Tensor) -> Any:
        """Apply the Bundle's post-processing to a case, as in MONAI's evaluator."""
        batch = {Keys.IMAGE: case.image[None], Keys.LABEL: case.label[None], Keys.PRED: output[None]}
        (item,) = decollate_batch(batch)
        with self.configuration.problems("postprocessing", "fails"):
            return apply_transform(self.postprocessing, item)


class _BundleLoss(Loss):
    """A Bundle's loss, called as by MONAI's trainer; cross-entropy of classes also takes probabilities."""

    def __init__(
        self, name: str, num_classes: int, loss: Callable[[Tensor, Tensor], Tensor], dense: bool
    ) -> None:
        soft = loss if isinstance(loss, nn.CrossEntropyLoss) and not dense else None
        super().__init__(f"of the Bundle {name}", num_classes, loss, soft)

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if isinstance(self.labels, nn.Module):
            self.labels.to(outputs.device)  # weights of classes
        return self.labels(outputs, targets)


def _floats(image: Any) -> Tensor:
    tensor: Tensor = convert_to_tensor(image, track_meta=False)
    return tensor if tensor.is_floating_point() else tensor.float()


class Parts:
    """The transforms of training samples, split as by MONAI's `CacheDataset`.

    Attributes:
        once: transforms before the first random one; a site keeps their result.
        drawn: all others, for training.
        cutting: ``drawn`` without random ones that do not crop: for samples of the same size and scale
            without augmentation.
    """

    __slots__ = ("cutting", "drawn", "once")  # hides them from loaders that seed attributes

    def __init__(self, transforms: Any) -> None:
        whole = (transforms if isinstance(transforms, Compose) else Compose(transforms)).flatten()
        first = whole.get_index_of_first(
            lambda t: isinstance(t, RandomizableTrait) or not isinstance(t, Transform)
        )
        every = list(whole.transforms)
        cut = len(every) if first is None else first
        self.once = Compose(every[:cut])
        self.drawn: list[Any] = every[cut:]
        # Copies, since training draws from its own transforms.
        self.cutting = [
            deepcopy(t) for t in self.drawn if not isinstance(t, RandomizableTrait) or _within(t, _CROPS)
        ]

    @property
    def crops(self) -> bool:
        """True if samples are random crops of a case."""
        return any(isinstance(t, RandomizableTrait) for t in self.cutting)

    @property
    def located(self) -> str:
        """The transform, if any, that needs the affine after the first random one, which is not kept."""
        return next((type(t).__name__ for t in self.drawn if isinstance(t, _LOCATED)), "")

    @property
    def rescaling(self) -> str:
        """The transform, if any, that scales the image after the first random one."""
        for transform in self.drawn:
            fixed = not isinstance(transform, RandomizableTrait) and _within(transform, _INTENSITY)
            if fixed and Keys.IMAGE in ensure_tuple(getattr(transform, "keys", ())):
                return type(transform).__name__
        return ""


def _within(transform: Any, package: str) -> bool:
    return type(transform).__module__.startswith(package)


def plain_sample(sample: Any) -> Any:
    """Return image and label of one or several samples as tensors without MONAI's metadata.

    Boolean labels become 1 and 0: MONAI's losses take no norm of booleans.
    """
    if not isinstance(sample, Mapping):
        return [plain_sample(part) for part in sample]
    plain = {key: convert_to_tensor(sample[key], track_meta=False) for key in (Keys.IMAGE, Keys.LABEL)}
    return {key: value.float() if value.dtype == torch.bool else value for key, value in plain.items()}


class BundleAugmentation(Randomizable):
    """The random transforms of a Bundle (`Parts.drawn`), image by image, and all that follow the first."""

    def __init__(self, transforms: Sequence[Any]) -> None:
        self.transform = Compose(transforms)

    def set_random_state(
        self, seed: int | None = None, state: np.random.RandomState | None = None
    ) -> BundleAugmentation:
        self.transform.set_random_state(seed, state)
        return self

    def __call__(self, samples: Sequence[Any]) -> list[Any]:
        """Return new samples; several samples from one are a list in its place."""
        return [plain_sample(self.transform(dict(sample))) for sample in samples]
