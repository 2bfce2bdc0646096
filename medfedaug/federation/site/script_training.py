"""Custom training loop of a script instead of the federation's loop.

The script runs in one thread, and the site answers the server's requests in another. Only one of them works
at a time: the site waits while the script trains, and the script waits while the site receives, scores and
sends. They share a `ScriptSession`, where the script passes its network and gets the methods' part of a
training (`LoopTraining`). An engine defines how they wait for each other (`CustomLoop`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from monai.transforms import Compose, RandomizableTrait, Transform
from monai.utils import CommonKeys as Keys
from torch import Tensor, nn

from medfedaug.data.checks import check_files_alone, check_known_classes
from medfedaug.errors import ConfigError, MedFedAugError, warn
from medfedaug.federation.site.local_training import LocalRound, LocalTraining
from medfedaug.federation.site.model import SiteModel
from medfedaug.federation.site.script_components import ScriptComponents
from medfedaug.federation.site.state import RoundMemory
from medfedaug.methods.base import SitePart, Step, overridden
from medfedaug.methods.compatibility import methods_with
from medfedaug.statistics import image_moments
from medfedaug.tasks.base import plain_tensor

# Standard deviations, and their ratio, from which an image is of another scale. A patch may vary little.
_MEANS, _SPREADS = 10, 4


class ScriptSession:
    """Session of a script at a site.

    Attributes:
        training: the methods' part of the training, after `join`.
    """

    training: LoopTraining

    def __init__(
        self, site: SiteModel, memory: RoundMemory, build: Callable[[ScriptComponents], LoopTraining]
    ) -> None:
        self.site, self.memory, self._build = site, memory, build
        self.error: Exception | None = None

    def files(self, split: str) -> list[dict[str, Any]]:
        """Return the cases of a split; see `medfedaug.client.files`."""
        folder, classes = self.site.folder, self.site.config.classes
        with self._noted():
            check_files_alone(folder, "the training script")
            if folder.task == "classification":
                check_known_classes(folder, classes)
        files = []
        for case in folder.cases[split]:
            images = [str(path) for path in case.files]
            # The index of its class is the label of a photograph.
            label = classes.index(case.label) if isinstance(case.label, str) else str(case.label)
            image: Any = images if len(images) > 1 else images[0]
            files.append({"name": case.name, Keys.IMAGE: image, Keys.LABEL: label})
        return files

    def join(self, components: ScriptComponents) -> LoopTraining:
        """Take part with a script's components."""
        with self._noted():
            self.training = self._build(components)
        return self.training

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """Keep an error for the site, whatever the script does with it."""
        try:
            yield
        except Exception as error:
            self.error = error
            raise


class CustomLoop(ABC):
    """A site's view of a script with a training loop."""

    @abstractmethod
    def start(self, session: ScriptSession) -> None:
        """Run the script until it waits for its first round; end a running one first."""

    @abstractmethod
    def train(self, round_: LocalRound) -> None:
        """Let the script train for a round."""


class _MethodTransform(Transform, RandomizableTrait):
    """Apply the methods' transforms to a training image, after their exchange before training.

    `RandomizableTrait` keeps MONAI's caches from storing the results.
    """

    def __init__(self, make: Callable[[], Sequence[Transform]]) -> None:
        self._make: Callable[[], Sequence[Transform]] | None = make
        self._current: Compose | None = None
        self.first: Any = None
        """The round's first image in this process, if any."""
        # In shared memory, for the worker processes of a loader.
        self._used = torch.zeros(1, dtype=torch.int64).share_memory_()

    @property
    def used(self) -> int:
        """The number of images since the round began, at least 1 if there was any."""
        return int(self._used)

    def begin(self, current: Compose | None = None) -> Compose:
        """Begin a round with the site's transforms for it, by default new ones."""
        assert self._make is not None
        # Not tested for truth: `len` of a `Compose` flattens it, which reseeds the transforms.
        self._current = Compose(list(self._make())) if current is None else current
        self._used.zero_()
        self.first = None
        return self._current

    def __call__(self, data: Mapping[Any, Any]) -> Any:
        current = self.begin() if self._current is None else self._current
        if self.first is None:
            self.first = data.get(Keys.IMAGE)
        self._used += 1
        return current(data)

    def __getstate__(self) -> dict[str, Any]:  # for a loader's processes
        current = self.begin() if self._current is None else self._current
        return {"_make": None, "_current": current, "_used": self._used, "first": None}


class LoopTraining(LocalTraining):
    """The methods' part of a site's training by a custom loop."""

    def __init__(
        self, model: SiteModel, loop: CustomLoop, criterion: Callable[[Tensor, Tensor], Tensor] | None = None
    ) -> None:
        super().__init__(model)
        self.loop = loop
        self.criterion = criterion or self.criterion
        for name, part in self.parts.items():
            self._check(name, part)
        self.transform = _MethodTransform(lambda: self._transforms(training=True))
        self.evaluation_transform = _MethodTransform(lambda: self._transforms(training=False))
        self._step: Step | None = None
        self.losses: list[Tensor] = []
        self.steps = 0
        self._corrected = self._compared = False
        self._should_stop: Callable[[], bool] = lambda: False
        self._normalising = [m.name for m in methods_with(model.composition.methods, "normalised_input")]
        self._statistics = partial(SiteModel.statistics, model)  # they stay here

    def _check(self, name: str, part: SitePart) -> None:
        for hook, what in (
            ("mix", "changes batches and labels before"),
            ("gradients", "takes gradients again in"),
        ):
            if overridden(part, [hook]):
                raise ConfigError(
                    f"{name} {what} the step, which only the federation's own loop can: take another method, "
                    "or that loop"
                )

    def _transforms(self, *, training: bool) -> list[Transform]:
        return [t for part in self.parts.values() for t in part.transforms(training=training)]

    def run(
        self, loader: Any, round_: LocalRound, should_stop: Callable[[], bool] = lambda: False
    ) -> list[float]:
        """Let the script train."""
        self.begin(loader.dataset, should_stop)
        self.loop.train(round_)
        self.census.all_steps()  # the site has read the script, and allows it
        self.check_stop(should_stop)
        problem = ""
        if not self.steps:
            problem = "took no step; it has to call step() after each step of its optimiser"
        elif not self.transform.used and self.transforming:
            problem = (
                f"trained without federation.transform, in which {', '.join(self.transforming)} changes the "
                "training images; put it at the end of the transforms of the training data"
            )
        if problem:
            raise MedFedAugError(
                f"site {self.folder.name}, round {round_.number}: the script's loop {problem}"
            )
        if self._normalising and isinstance(self.transform.first, Tensor) and not self._compared:
            self._compared = True
            self._compare_scales(image_moments(plain_tensor(self.transform.first)))
        return self.values(self.losses)

    def _compare_scales(self, image: Mapping[str, Tensor]) -> None:
        """Warn of an image on another scale than the statistics with which a method normalises."""
        own = self._statistics()
        mean, std = (image[key].to(own.std) for key in ("mean", "std"))
        spread = std / own.std
        apart = ((mean - own.mean).abs() > _MEANS * own.std) | (spread > _SPREADS)
        apart = (apart | (spread * _SPREADS**2 < 1)) & (own.std > 0)
        for channel in apart.nonzero().flatten().tolist()[:1]:
            warn(
                f"federation.transform got an image with mean {mean[channel]:.3g} and standard deviation "
                f"{std[channel]:.3g} in channel {channel}, and {self._normalising[0]} normalises with "
                f"{own.mean[channel]:.3g} and {own.std[channel]:.3g}",
                site=self.folder.name,
                hint=f"Scale images as the job does (--intensity {self.config.intensity}), or give join() "
                "samples prepared by the script.",
            )

    def begin(self, dataset: Any, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Begin a round."""
        self._step, self.losses, self.steps, self._should_stop = None, [], 0, should_stop
        self.transform.begin(dataset.after)
        self.evaluation_transform.begin()
        self.network.train()

    @property
    def transforming(self) -> list[str]:
        """The methods that change training images in `Federation.transform`."""
        return [name for name, part in self.parts.items() if list(part.transforms(training=True))]

    def loss_terms(self, batch: Any, output: Tensor) -> Tensor:
        """See `Federation.loss_terms`."""
        self.check_stop(self._should_stop)
        inputs, targets = _pair(batch)
        outputs = plain_tensor(output)
        inputs, targets = (plain_tensor(value).to(outputs.device) for value in (inputs, targets))
        self._step = Step(self.network, inputs, targets, outputs, self.criterion, mixed=[(1.0, targets)])
        terms = list(self.terms(self._step))
        self._corrected = False
        return torch.stack(terms).sum() if len(terms) > 1 else terms[0] if terms else outputs.new_zeros(())

    def before_step(self) -> None:
        """See `Federation.before_step`."""
        step = self._passed()
        for part in self.parts.values():
            part.before_step(step)
        self._corrected = True

    def step(self, loss: Tensor | None = None) -> None:
        """See `Federation.step`."""
        step = self._passed()
        correcting = [n for n, p in self.parts.items() if type(p).before_step is not SitePart.before_step]
        if correcting and not self._corrected:
            raise MedFedAugError(
                f"{correcting[0]} corrects the gradients: call before_step() between loss.backward() and the "
                "step of the optimiser"
            )
        self._corrected = False
        self.steps += 1
        if loss is not None:
            self.losses.append(plain_tensor(loss.detach()))
        for part in self.parts.values():
            part.after_step(step)

    def _passed(self) -> Step:
        if self._step is None:
            raise MedFedAugError("call loss_terms(batch, output) for each batch, before the step")
        return self._step


class Federation:
    """A federation as a training loop sees it: rounds to iterate over, a transform, loss terms, steps.

    Iteration yields a `LocalRound` for each training request of the server. When a round begins, the network
    has the global weights; when the loop asks for the next round, the site sends the network's weights.
    Within a round torch's random numbers depend only on the round's seed.
    """

    def __init__(self, training: LoopTraining, wait: Callable[[], LocalRound | None]) -> None:
        self._training, self._wait = training, wait

    def __iter__(self) -> Iterator[LocalRound]:
        while (round_ := self._wait()) is not None:
            yield round_

    @property
    def site(self) -> str:
        """The site's name."""
        return self._training.folder.name

    @property
    def network(self) -> nn.Module:
        """The network with the methods' layers, on the site's device."""
        return self._training.network

    @property
    def device(self) -> torch.device:
        """The site's device."""
        return self._training.device

    @property
    def transform(self) -> Transform:
        """Return the methods' transform of a training image, for a dictionary with the key ``image``.

        Put it after the preparation of an image, before or after spatial augmentation. Its random draws
        depend on the round's seed alone if the loader makes its samples in the loop's process.
        """
        return self._training.transform

    @property
    def evaluation_transform(self) -> Transform:
        """Return the methods' transform of a validation or test image, for a custom `score`."""
        return self._training.evaluation_transform

    def loss_terms(self, batch: Any, output: Tensor) -> Tensor:
        """Return the methods' terms of the loss of a batch; call it after each pass of the network.

        Args:
            batch: a dictionary with ``image`` and ``label``, or a pair of them, as the network got them.
            output: the network's output.

        Returns:
            A scalar with its graph; 0 if no method adds a term.
        """
        return self._training.loss_terms(batch, output)

    def before_step(self) -> None:
        """Let methods correct the gradients between ``loss.backward()`` and the optimiser's step.

        Without such methods the call is optional.
        """
        self._training.before_step()

    def step(self, loss: Tensor | None = None) -> None:
        """Report a step of the optimiser.

        Args:
            loss: the loss of the batch, for the report of the run.

        Raises:
            MedFedAugError: when a method had to correct the gradients before.
        """
        self._training.step(loss)

    def follow(
        self, optimiser: torch.optim.Optimizer, loss: Callable[[], Tensor | None] = lambda: None
    ) -> None:
        """Call `before_step` and `step` at each step of an optimiser, for loops that cannot be changed.

        Args:
            optimiser: the network's optimiser.
            loss: returns the loss of the batch, for the report of the run.
        """

        def before(optimiser: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            # The first argument is the optimiser. A closure, as of Lightning, computes the gradients.
            closure = args[1] if len(args) > 1 else kwargs.get("closure")
            if closure is None:
                self.before_step()
                return None

            def corrected() -> Any:
                loss_value = closure()
                self.before_step()
                return loss_value

            return args[:1], {**kwargs, "closure": corrected}

        optimiser.register_step_pre_hook(before)
        optimiser.register_step_post_hook(lambda *_: self.step(loss()))


def _pair(batch: Any) -> tuple[Tensor, Tensor]:
    if isinstance(batch, Mapping):
        return batch[Keys.IMAGE], batch[Keys.LABEL]
    inputs, targets = batch[:2]
    return inputs, targets
