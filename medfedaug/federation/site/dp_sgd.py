"""DP-SGD: local training whose weights say little about any one case."""

from __future__ import annotations

import logging
import math
import random
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from monai.transforms import Compose
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from medfedaug.errors import ConfigError, MedFedAugError, first_line, withheld
from medfedaug.federation.site.interrupted_round import HalfRound
from medfedaug.federation.site.local_training import LocalRound, LocalTraining
from medfedaug.federation.site.samples import SiteSamples, TrainingSamples
from medfedaug.methods.base import STEP_HOOKS, Method, overridden
from medfedaug.sampling.augmentation import TrainingDataset
from medfedaug.sampling.prefetch import on_device
from medfedaug.tasks import Sample
from medfedaug.utils.secure_random import secret_normal

if TYPE_CHECKING:
    from medfedaug.federation.site.model import SiteModel

_log = logging.getLogger(__name__)

# What a method does with images, gradients and weights: nothing bounds what one case changes there.
_HOOKS = ("personalise", "scoring", "start_round", "end_round", *STEP_HOOKS)


class PrivateTraining(LocalTraining):
    r"""Local training by DP-SGD (Abadi et al., CCS 2016).

    .. math:: g = \frac{1}{qn}\Bigl(\sum_{i \in S} g_i \min(1, C/\lVert g_i\rVert) + \sigma C\,\xi\Bigr),
        \qquad \xi \sim N(0, I)

    over a set S that each of the n cases is in with probability q, on its own and anew in every step, with
    one random sample (slice, patch) of a case, whose gradient is g_i. So a case, whatever the number of its
    samples, moves a step by at most C / (qn). q is the batch size divided by n, at most 1. An epoch has
    ⌈n / batch size⌉ steps, in which a case is drawn once on average. The optimiser of the run takes g in
    place of its gradient.

    **Why a case moves the sum by no more than C.** Each drawn case passes through the network alone, with
    draws r_i of its own for augmentation, patch and dropout, which begin at a new seed from the operating
    system. So g_i is a function of the model, the case and r_i, and of no other case. r_i is drawn
    independently of which cases there are. Given all r_i, a case that is added or removed adds or removes
    its own term, of norm C at most, and changes no other: the step is a sampled Gaussian mechanism of
    sensitivity C. Since that holds for every value of the r_i, and their distribution does not depend on the
    data, it holds for the mixture over them. Nobody needs to be kept from knowing the r_i. S and ξ must stay
    secret; they come from the operating system too. Had all cases one stream of draws from the seed of the
    run, one more case would shift those of all that follow. A run therefore never repeats.

    **Nothing but g follows from the cases.** A gradient that is not finite is 0, and so is that of a case on
    which transforms, network or loss fail, or for which memory does not suffice: the site's own log counts
    them, and the round goes on. Losses are not looked at. The number of steps, and the number that the
    server weighs the site by, follow from the number of cases, and not from that of their slices. The
    network's buffers are put back after every case. The time that a round takes is not covered.

    Args:
        model: the site's; see `LocalTraining`.
        clip: C.
        noise: σ.
        spend: called with the number of steps and q before the first step of a round; raises if the site's
            budget does not allow them.

    Attributes:
        random: draws sets, samples and seeds; the operating system's.

    Raises:
        ConfigError: where one case changes what another one adds, or more than the gradient: batch norm,
            methods with terms, steps, layers or mixtures of their own, or that normalise with the site's own
            statistics without noise, and low precision.

    Deviations:
        The paper draws samples, here cases, since a patient is a case and not a slice. The loss of each
        case is taken alone: MONAI's overlap losses would otherwise be over the whole batch. Opacus, whose
        account this follows, computes the gradients of single images in one pass of a batch. That takes each
        layer's word for it that the images of a batch do not meet, needs a formula for each kind of layer,
        and was 1.1 to 6 times slower for U-Nets on a CPU.
    """

    private: ClassVar[bool] = True
    uncaptured: ClassVar[str] = "with DP-SGD each case passes alone, and what a batch holds is secret"

    def __init__(
        self, model: SiteModel, *, clip: float, noise: float, spend: Callable[[int, float], None]
    ) -> None:
        super().__init__(model)
        self.clip, self.noise, self.spend = clip, noise, spend
        self.random: random.Random = secrets.SystemRandom()
        self._check(model.composition.methods)

    def _check(self, methods: Sequence[Method]) -> None:
        for name, module in self.network.named_modules():
            if isinstance(module, _BatchNorm) or (
                isinstance(module, _NormBase) and module.track_running_stats
            ):
                raise self._refused(
                    f"the network has batch norm ({name}), which mixes the images of a batch: take instance "
                    'or group norm, for instance --network-args \'{"norm": "instance"}\''
                )
        for method in methods:
            part = self.parts[method.name]
            layers = type(method).prepare_network is not Method.prepare_network
            if overridden(part, _HOOKS) or layers or method.epochs_before_test:
                raise self._refused(
                    f"nothing bounds what one case changes in the local training of {method.name}"
                )
            if part.uses_unsent_statistics:  # one case moves the inputs, and so the gradients, of all others
                raise self._refused(
                    f"{method.name} normalises with statistics of all the site's images, which one case "
                    "changes: take fedrdn, whose statistics get noise, or leave it out"
                )
        if self.config.precision == "bfloat16":
            raise self._refused("precision is bfloat16, and float32 is needed")

    def _refused(self, reason: str) -> ConfigError:
        return ConfigError(
            f"site {self.folder.name}: it trains with differential privacy (sgd_noise_multiplier of its "
            f"privacy policy), and {reason}"
        )

    def try_out(self, samples: SiteSamples) -> None:
        """Compute a gradient of noise, as of a case.

        The noise has the shape that the site's images mostly have, so that one case decides nothing.
        """
        training, task = _training(samples), self.task
        # Without the transforms of methods, which may wait for what they exchange.
        before, after, seed = Compose(list(task.transforms())), Compose([]), self.random.getrandbits(32)
        dataset = TrainingDataset(training, before, task.augmentation(), after, seed)
        self._try_out(lambda: task.collate(dataset.transformed([training.noise()])))

    def _try_out(self, noise: Callable[[], Sample]) -> None:
        try:
            with self.own_random_numbers(), self._own_buffers():
                self._pass(noise())
        except Exception as error:
            reason = withheld(first_line(error).rstrip("."))
            raise self._refused(
                f"{self.config.network} cannot be trained on one case at a time ({reason}); no budget was "
                "spent on it"
            ) from error
        finally:
            self.network.zero_grad(set_to_none=True)

    def count(self, samples: SiteSamples) -> int:
        """The number of cases: how many slices a case has is not public."""
        return len(_training(samples).stored)

    def batches(self, samples: SiteSamples, dataset: Any, seed: int) -> Any:
        """The sets of cases of an epoch, which follow from no seed."""
        training = _training(samples)
        if not isinstance(dataset, TrainingDataset):
            raise self._refused("the images are not those of this site alone")
        return _CaseDraws(training, dataset, self.task.collate, self.config.batch_size, self.random)

    def run(
        self,
        loader: Any,
        round_: LocalRound,
        should_stop: Callable[[], bool] = lambda: False,
        half: HalfRound | None = None,
    ) -> list[float]:
        """Train, after what it spends was entered.

        A round that goes on from its middle was entered when it began, and nothing of it has been sent. Its
        other steps draw new sets and new noise, so that the update is one of as many steps as were entered.

        Returns:
            No loss: nothing bounds what a case changes in it.

        Raises:
            ConfigError: before anything was spent, where the network cannot be trained so.
            MedFedAugError: when the training was stopped.
        """
        self._try_out(loader.noise)
        steps, half = round_.steps or round_.epochs * len(loader), half or HalfRound.none()
        trained = [p for p in self.network.parameters() if p.requires_grad]
        optimiser = self.optimiser(trained, round_.number)
        roots = {"network": self.network, "optimiser": optimiser}
        taken = half.resume(roots, None, self.device)  # in the place of losses, of which nothing is known
        if not taken:
            self.spend(steps, loader.rate)
        self.network.train()
        drawn, failed, reason = 0, 0, ""
        with _own_global_random_numbers():
            for _ in range(steps - len(taken)):
                self.check_stop(should_stop)
                total = [torch.zeros_like(p, dtype=torch.float64) for p in trained]
                for case in loader.draw():
                    drawn += 1
                    try:
                        self._add(case, total, trained)
                    except Exception as error:  # of whatever kind, it would tell that this case is there
                        failed, reason = failed + 1, first_line(error)
                for parameter, clipped in zip(trained, total, strict=True):
                    noise = secret_normal(parameter.shape).to(clipped) * (self.noise * self.clip)
                    parameter.grad = ((clipped + noise) / loader.expected).to(parameter.dtype)
                optimiser.step()
                taken.append(torch.zeros(()))
                half.step(roots, taken, [], self.device)
        self.network.zero_grad(set_to_none=True)
        if failed:
            _log.warning(
                "site %s: %d of %d cases that were drawn in round %d added nothing to the training, the last "
                "one since %s; the server is not told",
                *(self.folder.name, failed, drawn, round_.number, reason),
            )
        return []

    def _add(self, case: Callable[[], Sample], total: list[Tensor], trained: list[nn.Parameter]) -> None:
        """Add the clipped gradient of one case.

        Raises:
            Exception: where there is none; nothing was added then.
        """
        with self._own_buffers():
            self._reseed()
            self._pass(case())
        gradients = [None if p.grad is None else p.grad.double() for p in trained]
        # In float64, in which squares of float32 cannot overflow.
        square = float(sum(float(g.square().sum()) for g in gradients if g is not None))
        if not math.isfinite(square):
            raise MedFedAugError("its gradient is not finite")
        scale = min(1.0, self.clip / math.sqrt(square)) if square else 1.0
        for clipped, gradient in zip(total, gradients, strict=True):
            if gradient is not None:
                clipped.add_(gradient, alpha=scale)

    def _reseed(self) -> None:
        """Let all generators begin anew: torch's for dropout, NumPy's and Python's for other packages."""
        torch.default_generator.manual_seed(self.random.getrandbits(63))
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                torch.cuda.manual_seed(self.random.getrandbits(63))
        np.random.seed(self.random.getrandbits(32))
        random.seed(self.random.getrandbits(64))

    def _pass(self, batch: Sample) -> None:
        """Compute the gradient of one case, whose samples are all of the batch."""
        self.network.train()
        self.network.zero_grad(set_to_none=True)
        inputs, targets = on_device(batch, self.device)
        self.criterion(self.network(inputs), targets).backward()

    @contextmanager
    def _own_buffers(self) -> Iterator[None]:
        """Within it a pass may change the network's buffers, which then are as before."""
        before = {name: value.clone() for name, value in self.network.named_buffers()}
        try:
            yield
        finally:
            with torch.no_grad():
                for name, value in self.network.named_buffers():
                    value.copy_(before[name])


def _training(samples: SiteSamples) -> TrainingSamples:
    training = samples.training()
    assert isinstance(training, TrainingSamples)  # others come with a loop of one's own
    return training


@contextmanager
def _own_global_random_numbers() -> Iterator[None]:
    """Within it NumPy's and Python's own generators may be seeded, which then are as before."""
    of_numpy, of_python = np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        np.random.set_state(of_numpy)
        random.setstate(of_python)


class _CaseDraws:
    """Draws the cases of a step, each with one random sample and random numbers of its own.

    Args:
        samples: of all cases.
        dataset: the same, transformed.
        collate: makes a batch.
        size: the number of cases that a step has on average.
        random: draws.
    """

    def __init__(
        self,
        samples: TrainingSamples,
        dataset: TrainingDataset,
        collate: Callable[[list[Sample]], Sample],
        size: int,
        random: random.Random,
    ) -> None:
        self.samples, self.dataset, self.collate, self.random = samples, dataset, collate, random
        self.ranges, cases = samples.ranges(), len(samples.stored)
        self.rate = min(1.0, size / cases)
        self.expected = self.rate * cases
        self._steps = -(-cases // size)

    def __len__(self) -> int:
        """The steps of an epoch."""
        return self._steps

    def draw(self) -> list[Callable[[], Sample]]:
        """Draw a batch of each case of a step; a case without any sample is in none."""
        drawn = [one for one in self.ranges if self.random.random() < self.rate and len(one)]
        return [lambda one=one: self._batch(one) for one in drawn]  # type: ignore[misc]

    def _batch(self, case: range) -> Sample:
        index, seed = self.random.choice(case), self.random.getrandbits(32)
        self.dataset.reseed(seed)
        return self.collate([self.dataset[index]])

    def noise(self) -> Sample:
        """A batch of noise in the place of a case's."""
        return self.collate(self.dataset.transformed([self.samples.noise()]))
