"""A training loop of a user's own in the place of the federation's, and what a site lends it.

The loop runs in a script, in a thread of its own; the site answers the server's requests in another. Of the
two only one works at a time: the site waits while the script trains, and the script while the site receives,
scores and sends. What the two share is a `Desk`, where the script brings its network and takes what methods
need of a loop (`LoopTraining`). An engine says how they wait for each other (`ForeignLoop`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from monai.transforms import Compose, RandomizableTrait, Transform
from monai.utils import CommonKeys as Keys
from torch import Tensor, nn

from medfedaug.config.run import RunConfig
from medfedaug.data.checks.site_checks import check_files_alone, check_known_classes
from medfedaug.errors import ConfigError, DataError, MedFedAugError
from medfedaug.federation.site.interrupted_round import HalfRound
from medfedaug.federation.site.local_training import LocalRound, LocalTraining
from medfedaug.federation.site.script_components import Brought
from medfedaug.methods.base import SitePart, Step
from medfedaug.tasks.base import plain_tensor

if TYPE_CHECKING:
    from medfedaug.federation.site.model import SiteModel
    from medfedaug.federation.site.trainer import SiteTrainer


class Desk:
    """Meeting point of a site and a script.

    Args:
        site: whose side is built around what the script brings, in the script's thread.

    Attributes:
        brought: what the script gave to `join`.
        error: why the script could not take part, if it asked and could not.
    """

    def __init__(self, site: SiteTrainer) -> None:
        self.site, self.brought = site, Brought()
        self.error: Exception | None = None

    @property
    def config(self) -> RunConfig:
        """The job's settings. The places of its classes are the labels of photographs."""
        return self.site.config

    @property
    def training(self) -> LoopTraining:
        """The methods' part, once the script has joined."""
        assert isinstance(self.site.training, LoopTraining)
        return self.site.training

    def files(self, split: str) -> list[dict[str, Any]]:
        """The cases of a split as MONAI's transforms take them.

        Returns:
            For each case ``name``, ``image``, a path or the list of the paths of its channels, and ``label``,
            a path or the index of the class among the federation's.

        Raises:
            DataError: for a class that the federation has not, and for images that a script cannot read.
        """
        folder = self.site.folder
        try:
            check_files_alone(folder, "the training script")
            if folder.task == "classification":
                check_known_classes(folder, self.config.classes)
        except DataError as error:
            self.error = error
            raise
        found = []
        for case in folder.cases[split]:
            images = [str(path) for path in case.files]
            label = self.config.classes.index(case.label) if isinstance(case.label, str) else str(case.label)
            image: Any = images if len(images) > 1 else images[0]
            found.append({"name": case.name, Keys.IMAGE: image, Keys.LABEL: label})
        return found

    def join(self, brought: Brought) -> LoopTraining:
        """Take part.

        Raises:
            MedFedAugError: when a method, the network or the data do not go together with a loop of one's
                own.
        """
        self.brought = brought
        try:
            self.site.build_around(brought)
            return self.training
        except Exception as error:
            self.error = error
            raise


class ForeignLoop(ABC):
    """A site's view of a script with a training loop."""

    @abstractmethod
    def start(self, desk: Desk) -> None:
        """Run the script from its beginning until it waits for its first round.

        A script that runs already is ended first: what it has may be of an interrupted round.

        Raises:
            MedFedAugError: when it ends before.
        """

    @abstractmethod
    def train(self, round_: LocalRound) -> None:
        """Let the script train for a round.

        Raises:
            MedFedAugError: when it ends before the round does.
        """

    def stepped(self) -> None:
        """Called in the script's thread after each step of its optimiser."""


class _MethodTransform(Transform, RandomizableTrait):
    """Apply the methods' transforms to a training image, after their exchange before training.

    With `RandomizableTrait`, MONAI's caches do not keep what it returns.
    """

    def __init__(self, make: Callable[[], Sequence[Transform]]) -> None:
        self._make: Callable[[], Sequence[Transform]] | None = make
        self._current: Compose | None = None
        # In shared memory: a loader may make its samples in processes of its own.
        self._used = torch.zeros(1, dtype=torch.int64).share_memory_()

    @property
    def used(self) -> int:
        """The number of images since the round began, at least 1 where there was any."""
        return int(self._used)

    def begin(self, current: Compose | None = None) -> Compose:
        """A round begins, with the transforms that the site has for it, or new ones."""
        assert self._make is not None
        # Never its truth: the length of a `Compose` makes another one, which seeds the transforms anew.
        self._current = Compose(list(self._make())) if current is None else current
        self._used.zero_()
        return self._current

    def __call__(self, data: Mapping[Any, Any]) -> Any:
        current = self.begin() if self._current is None else self._current
        self._used += 1
        return current(data)

    def __getstate__(self) -> dict[str, Any]:  # for a loader's processes
        current = self.begin() if self._current is None else self._current
        return {"_make": None, "_current": current, "_used": self._used}


class LoopTraining(LocalTraining):
    """The methods' part of the training of one site, for a loop that is not the federation's.

    Args:
        model: see `LocalTraining`; the job must not freeze entries of the network.
        loop: the script.
        criterion: the script's own loss.

    Attributes:
        losses: that the script has told in this round.
        steps: of this round.
    """

    uncaptured: ClassVar[str] = "a script's own loop takes the steps"

    def __init__(
        self,
        model: SiteModel,
        loop: ForeignLoop,
        criterion: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__(model)
        self.loop = loop
        self.criterion = criterion or self.criterion
        for name, part in self.parts.items():
            self._check(name, part)
        if self.frozen:
            raise ConfigError("`freeze` has no effect with a custom loop; remove it")
        self.transform = _MethodTransform(lambda: self._transforms(training=True))
        self.evaluation_transform = _MethodTransform(lambda: self._transforms(training=False))
        self._step: Step | None = None
        self.losses: list[Tensor] = []
        self.steps = 0
        self._corrected = False
        self._should_stop: Callable[[], bool] = lambda: False

    def _check(self, name: str, part: SitePart) -> None:
        if type(part).mix is not SitePart.mix:
            raise ConfigError(
                f"{name} changes batches and their labels before the network sees them, and a loop of one's "
                "own makes its batches itself: take another method, or the federation's own loop"
            )
        if type(part).gradients is not SitePart.gradients:
            raise ConfigError(
                f"{name} computes the gradients of a step again at other weights, which only the "
                "federation's own loop can: take another method, or that loop"
            )

    def _transforms(self, *, training: bool) -> list[Transform]:
        return [t for part in self.parts.values() for t in part.transforms(training=training)]

    def run(
        self,
        loader: Any,
        round_: LocalRound,
        should_stop: Callable[[], bool] = lambda: False,
        half: HalfRound | None = None,
    ) -> list[float]:
        """Let the script train. Nothing is kept of half a round: only the script knows where it is.

        Returns:
            The losses that the script told, if any.

        Raises:
            MedFedAugError: when the script ends, takes no step, leaves out the methods' transform, or has a
                loss that is not finite.
        """
        self.begin(loader.dataset, should_stop)
        self.loop.train(round_)
        self.check_stop(should_stop)
        if not self.steps:
            raise MedFedAugError(
                f"site {self.folder.name}: the script's loop took no step in round {round_.number}; it has "
                "to call step() after each step of its optimiser"
            )
        if not self.transform.used and self.transforming:
            raise MedFedAugError(
                f"site {self.folder.name}: the script's loop trained in round {round_.number} without "
                f"federation.transform, in which {', '.join(self.transforming)} changes the training images; "
                "put it at the end of the transforms of the training data"
            )
        return self.values(self.losses)

    def begin(self, dataset: Any, should_stop: Callable[[], bool] = lambda: False) -> None:
        """A round begins."""
        self._step, self.losses, self.steps, self._should_stop = None, [], 0, should_stop
        self.transform.begin(dataset.after)
        self.evaluation_transform.begin()
        self.network.train()

    def average(self, others: Sequence[Sequence[float]]) -> None:
        """Average the losses of the steps with those that other processes had for their part of the batch."""
        try:
            pairs = list(zip(self.losses, *others, strict=True))
        except ValueError as error:
            raise MedFedAugError(
                f"site {self.folder.name}: the processes of the script told step() other numbers of losses"
            ) from error
        self.losses = [(own + sum(rest)) / (1 + len(rest)) for own, *rest in pairs]

    @property
    def transforming(self) -> list[str]:
        """The methods that change training images by `Federation.transform`."""
        return [name for name, part in self.parts.items() if list(part.transforms(training=True))]

    @property
    def passed(self) -> bool:
        """Return whether the script has called `loss_terms` in this round."""
        return self._step is not None

    @property
    def has_loss(self) -> bool:
        """Return whether the script has given a loss to `step` in this round."""
        return bool(self.losses)

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
        self.loop.stepped()

    def _passed(self) -> Step:
        if self._step is None:
            raise MedFedAugError("call loss_terms(batch, output) for each batch, before the step")
        return self._step


class Federation:
    """A federation as a training loop sees it: rounds to iterate over, a transform, loss terms, steps.

    Iterating gives one `LocalRound` after the other, as the server asks this site to train. When a round
    begins, the network has the global weights; when the loop goes on to the next, what it has then is sent.
    Within a round torch's random numbers follow from the round's seed.

    Args:
        training: the methods' part.
        wait: waits for the next round; ``None`` at the end of the job.
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
        """The network with the methods' layers in it, on the site's device."""
        return self._training.network

    @property
    def device(self) -> torch.device:
        """The site's device."""
        return self._training.device

    @property
    def transform(self) -> Transform:
        """Return the methods' transform of a training image, for a dictionary with the key ``image``.

        It comes after all that prepares an image and may be before or after spatial augmentation. Its random
        draws follow from the round's seed, as long as the loader makes its samples in the loop's process.
        """
        return self._training.transform

    @property
    def evaluation_transform(self) -> Transform:
        """The same for validation and test images, for a `score` of one's own."""
        return self._training.evaluation_transform

    def loss_terms(self, batch: Any, output: Tensor) -> Tensor:
        """Return the methods' terms of the loss of a batch; call it after each pass of the network.

        Args:
            batch: a dictionary with ``image`` and ``label``, or a pair of them, as the network was given
                them.
            output: what the network gave.

        Returns:
            A scalar with its graph; 0 where no method adds anything.
        """
        return self._training.loss_terms(batch, output)

    def before_step(self) -> None:
        """Let methods correct the gradients: between ``loss.backward()`` and the step of the optimiser.

        Only some methods do; without them the call may be left out.
        """
        self._training.before_step()

    def step(self, loss: Tensor | None = None) -> None:
        """Tell that the optimiser has stepped.

        Args:
            loss: of the batch, for the report of the run.

        Raises:
            MedFedAugError: when a method should have corrected the gradients before.
        """
        self._training.step(loss)

    def follow(
        self, optimiser: torch.optim.Optimizer, loss: Callable[[], Tensor | None] = lambda: None
    ) -> None:
        """Call `before_step` and `step` at each step of an optimiser, for loops that cannot be changed.

        Args:
            optimiser: of the network.
            loss: returns the loss of the batch, for the report of the run.
        """

        def before(optimiser: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            # The first argument is the optimiser. A closure, as Lightning gives one, makes the gradients.
            closure = args[1] if len(args) > 1 else kwargs.get("closure")
            if closure is None:
                self.before_step()
                return None

            def corrected() -> Any:
                found = closure()
                self.before_step()
                return found

            return args[:1], {**kwargs, "closure": corrected}

        optimiser.register_step_pre_hook(before)
        optimiser.register_step_post_hook(lambda *_: self.step(loss()))


def _pair(batch: Any) -> tuple[Tensor, Tensor]:
    if isinstance(batch, Mapping):
        return batch[Keys.IMAGE], batch[Keys.LABEL]
    inputs, targets = batch[:2]
    return inputs, targets
