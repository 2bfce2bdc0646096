"""A site's images for training and evaluation: decoded once, transformed, in batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from monai.data import DataLoader, Dataset
from monai.transforms import Compose, Transform
from monai.utils import CommonKeys as Keys
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset

from medfedaug.config.machine import Machine
from medfedaug.config.run import RunConfig, derive_seed
from medfedaug.data.base import Case, SiteFolder
from medfedaug.data.dataset_json import LABELLED
from medfedaug.data.preparation.cache import CaseCache, StoredCase
from medfedaug.data.preparation.preparation import Placement
from medfedaug.data.sites import checked_statistics
from medfedaug.methods.base import SitePart
from medfedaug.sampling import TrainingDataset, on_device, prefetch
from medfedaug.statistics import ChannelStatistics, average_moments
from medfedaug.tasks import EvaluationCase, Sample, Task

# Of the free memory of a GPU; the rest is for the network.
_SHARE_FOR_IMAGES = 0.25


class TrainingSamples(Sequence[Sample]):
    """The training samples of some cases, read lazily.

    Each item of a case (a photograph, a slice, a volume) gives `Task.samples_per_item` samples: the whole
    item, or patches. ``samples[i]`` is always the same patch; `draw` cuts a random one.

    Args:
        seed: seed, with the names, of the patches of ``samples[i]``.
    """

    def __init__(self, task: Task, stored: Sequence[tuple[str, StoredCase]], seed: int = 0) -> None:
        self.task, self.stored, self.seed = task, stored, seed
        per_item = task.samples_per_item
        self._ends = np.cumsum([0, *(case.shape(Keys.IMAGE)[0] * per_item for _, case in stored)])

    @classmethod
    def of(cls, task: Task, site: SiteFolder, cases: Sequence[Case], seed: int = 0) -> TrainingSamples:
        """Make the samples of some cases of a site, all in memory."""
        return cls(task, [(case.name, StoredCase(task.prepared(site, case))) for case in cases], seed)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        case, within = self._find(range(len(self))[index])
        random = np.random.RandomState(derive_seed(self.seed, self.stored[case][0], within))
        return self.task.fixed(self._read(case, within, random), random)

    def draw(self, index: int, random: np.random.RandomState) -> Sample:
        """Return a sample with a new random patch."""
        return self._read(*self._find(index), random)

    def ranges(self) -> list[range]:
        """Return the indices of the samples of each case."""
        return [range(int(a), int(b)) for a, b in pairwise(self._ends)]

    def case_of(self, index: int) -> int:
        """Return the position of a sample's case."""
        return self._find(index)[0]

    def noise(self) -> Sample:
        """Return a sample of noise in the most frequent shape of the cases, with a random label."""
        by_shape: dict[tuple[int, ...], list[StoredCase]] = {}
        for _, case in self.stored:
            items, *shape = case.shape(Keys.IMAGE)
            if items:
                by_shape.setdefault(tuple(shape), []).append(case)
        stored = max(by_shape.values(), key=len)[0]
        window = self.task.window(stored, 0, np.random.RandomState())
        image, label = (stored.read(key, 0, window) for key in (Keys.IMAGE, Keys.LABEL))
        noise = (255 * torch.rand(image.shape)).to(image)
        labels = torch.randint(self.task.num_classes, label.shape).to(label)
        return {Keys.IMAGE: noise, Keys.LABEL: labels}

    def _find(self, index: int) -> tuple[int, int]:
        """Return the case of a sample, and the sample's index within the case."""
        case = int(np.searchsorted(self._ends, index, side="right")) - 1
        return case, index - int(self._ends[case])

    def _read(self, case: int, within: int, random: np.random.RandomState) -> Sample:
        stored, item = self.stored[case][1], within // self.task.samples_per_item
        window = self.task.window(stored, item, random)
        return {key: stored.read(key, item, window) for key in (Keys.IMAGE, Keys.LABEL)}


class SiteSamples:
    """The samples of one site.

    Images are decoded and prepared once, and then kept: up to a limit in memory (on a GPU as long as it has
    room), the rest in files.
    """

    def __init__(
        self,
        folder: SiteFolder,
        task: Task,
        config: RunConfig,
        device: torch.device,
        parts: Mapping[str, SitePart],
        machine: Machine,
    ) -> None:
        self.folder, self.task, self.config = folder, task, config
        self.device, self.parts = device, parts
        self.machine = machine
        self.cache = CaseCache(machine, self._placed)
        self._training: TrainingSamples | None = None
        self._statistics: dict[str, ChannelStatistics] = {}
        self._room = 0.0  # bytes for images on the GPU
        if device.type == "cuda":
            self._room = _SHARE_FOR_IMAGES * torch.cuda.mem_get_info(device)[0]

    def take_prepared(self, other: SiteSamples) -> None:
        """Take over the prepared images of another object of the same site."""
        self.cache, self._room = other.cache, other._room

    def statistics(self, over: str = "image") -> ChannelStatistics:
        """Return the channel statistics of the training images, or of the test images if there are none."""
        if over not in self._statistics:
            folder = self.folder
            self._statistics[over] = (
                checked_statistics(folder, lambda: average_moments(self.case_moments(over)))
                if folder.trains
                else self.task.statistics(folder, over)
            )
        return self._statistics[over]

    def summary(self, *, statistics: bool, annotated: Sequence[str] | None = None) -> dict[str, str]:
        """Describe this site's images for the record of a run, with its ``annotated`` classes."""
        missing = self.folder.missing_channels
        constant = [i for i in self.statistics().constant if i not in missing] if statistics else []
        count = max(self.config.in_channels, *(i + 1 for i in constant), 0)
        names = self.config.channel_names or tuple(map(str, range(count)))
        channels = {"missing_channels": missing, "constant_channels": constant}
        partial = {LABELLED: ", ".join(annotated)} if annotated is not None else {}
        return {
            "scaling": self.folder.scaling,
            **partial,
            **{key: ", ".join(names[i] for i in indices) for key, indices in channels.items() if indices},
        }

    def case_moments(self, over: str = "image") -> Iterator[dict[str, Tensor]]:
        """Yield each training image's mean and standard deviation, (C,), before the methods' transforms."""
        for case in self.folder.cases["training"]:
            yield self.task.preparation.kept_moments(self._stored(case).read, over)

    def noise_batch(self, size: int, seed: int) -> Any:
        """Return a batch of noise in the most frequent shape, without the methods' transforms."""
        before, after = Compose(list(self.task.transforms())), Compose([])
        samples = self._of_folder()
        dataset = TrainingDataset(samples, before, self.task.augmentation(), after, seed)
        return self.task.collate(dataset.transformed([samples.noise() for _ in range(size)]))

    def _stored(self, case: Case) -> StoredCase:
        key = (self.task.key, *self.folder.identity(case))
        return self.cache.get(key, lambda: self.task.prepared(self.folder, case), case.files)

    def by_case(self) -> list[Sequence[Sample]]:
        """Return the samples of each training case; a case may have none."""
        return [TrainingSamples(self.task, [stored], self.config.seed) for stored in self._of_folder().stored]

    def training(self) -> Sequence[Sample]:
        """Return all training samples."""
        return self._of_folder()

    def _of_folder(self) -> TrainingSamples:
        if self._training is None:
            stored = [(case.name, self._stored(case)) for case in self.folder.cases["training"]]
            samples = TrainingSamples(self.task, stored, self.config.seed)
            if self.folder.trains and not samples:
                raise self.task.nothing_to_train(self.folder)
            self._training = samples  # needed several times a round, and made by opening all cases
        return self._training

    def of_cases(self, cases: Sequence[Case]) -> TrainingSamples:
        """Make the training samples of some cases, of any split, without keeping them."""
        return TrainingSamples.of(self.task, self.folder, cases, self.config.seed)

    def evaluation(self, split: str) -> Iterator[EvaluationCase]:
        """Yield the cases of a split; keep validation cases, which every round needs."""
        for case in self.folder.cases[split]:
            kept = split == "validation"
            yield self._kept_case(case) if kept else self.task.evaluation_case(self.folder, case)

    def _kept_case(self, case: Case) -> EvaluationCase:
        def make() -> dict[str, Tensor]:
            loaded = self.task.evaluation_case(self.folder, case)
            tensors: dict[str, Tensor] = {Keys.IMAGE: loaded.image, Keys.LABEL: loaded.label}
            if loaded.affine is not None:
                tensors["affine"] = loaded.affine
            if loaded.placement is not None:
                tensors["placement"] = loaded.placement.to_tensor()
            return tensors

        stored = self.cache.get(("validation", self.task.key, *self.folder.identity(case)), make, case.files)
        image, label = stored.read(Keys.IMAGE), stored.read(Keys.LABEL)
        affine = stored.read("affine") if "affine" in stored else None
        placement = Placement.from_tensor(stored.read("placement")) if "placement" in stored else None
        return EvaluationCase(case.name, image, label, affine, placement, case.owner)

    def transform(self, *, training: bool) -> Compose:
        """Return the transforms of an image before the network, without random augmentation."""
        return Compose([*self.task.transforms(), *self._method_transforms(training)])

    def batch_transform(self) -> Compose:
        """Return the transforms of `batches`."""
        return self.transform(training=False)

    def batches(self, samples: Sequence[Sample]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches of images, transformed for evaluation and on the network's device, with targets."""
        dataset = Dataset(samples, self.batch_transform())
        loader = DataLoader(dataset, batch_size=self.config.batch_size, collate_fn=self.task.collate)
        for batch in prefetch(loader, self.device):
            yield on_device(batch, self.device)

    def images(self, samples: Sequence[Sample]) -> Iterator[Tensor]:
        """Yield the images of `batches`."""
        return (inputs for inputs, _ in self.batches(samples))

    def dataset(self, seed: int) -> TorchDataset[Any]:
        """Return the training samples, transformed and augmented with random draws from ``seed``."""
        before, after = list(self.task.transforms()), self._method_transforms(training=True)
        if self.task.methods_first:
            before, after = [*before, *after], []
        return TrainingDataset(
            self._of_folder(), Compose(before), self.task.augmentation(), Compose(after), seed
        )

    def loader(self, dataset: Any, seed: int) -> DataLoader:
        """Return shuffled batches of a data set, in an order from ``seed``."""
        size = self.config.batch_size
        return DataLoader(
            dataset,
            batch_size=size,
            shuffle=True,
            # A single remaining image is dropped: batch norm over feature vectors needs two.
            drop_last=len(dataset) > size and len(dataset) % size == 1,
            generator=torch.Generator().manual_seed(seed),
            collate_fn=self.task.collate,
        )

    def _method_transforms(self, training: bool) -> list[Transform]:
        return [t for part in self.parts.values() for t in part.transforms(training=training)]

    def _placed(self, name: str, value: Tensor) -> Tensor:
        """Move an image or its label to the GPU if there is room."""
        if name not in (Keys.IMAGE, Keys.LABEL) or value.nbytes > self._room:
            return value
        self._room -= value.nbytes
        return value.to(self.device)
