"""DP-SGD: local training whose weights reveal little about any one case."""

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
from medfedaug.federation.site.local_training import LocalRound, LocalTraining
from medfedaug.federation.site.samples import SiteSamples, TrainingSamples
from medfedaug.hospital.primitives import secret_normal
from medfedaug.methods.base import STEP_HOOKS, Method, overridden
from medfedaug.sampling import TrainingDataset, on_device
from medfedaug.tasks import Sample

if TYPE_CHECKING:
    from medfedaug.federation.site.model import SiteModel

_log = logging.getLogger(__name__)

# Hooks on images, gradients and weights, where the influence of one case has no bound.
_HOOKS = ("scoring", "start_round", "end_round", *STEP_HOOKS)


class PrivateTraining(LocalTraining):
    """Local training by DP-SGD (Abadi et al., CCS 2016).

    ::

        g = (1/(qn)) (Σ_(i∈S) gᵢ min(1, C/‖gᵢ‖) + σ C ξ),   ξ ~ N(0, I)

    over a set S that contains each of the n cases independently with probability q, anew in every step. gᵢ
    is the gradient of one random sample (slice, patch) of case i. So a case, whatever the number of its
    samples, moves a step by at most C / (qn). q is the batch size divided by n, at most 1. An epoch has
    ⌈n / batch size⌉ steps, which draw each case once on average. The run's optimiser uses g as its gradient.

    **Why a case moves the sum by no more than C.** Each drawn case passes through the network by itself, with
    separate draws rᵢ for augmentation, patch and dropout from a new seed of the operating system. So gᵢ
    depends on the model, the case and rᵢ, and on no other case. The distribution of rᵢ does not depend on
    the set of cases. Given all rᵢ, adding or removing a case adds or removes its own term, of norm at most
    C, and changes no other: the step is a sampled Gaussian mechanism of sensitivity C. Since that holds for
    every value of the rᵢ, and their distribution does not depend on the data, it holds for the mixture over
    them. The rᵢ need not be secret. S and ξ must be; they come from the operating system too. With one
    stream of draws from the run's seed, one more case would shift the draws of all later ones. A run
    therefore never repeats.

    **Nothing but g depends on the cases.** A gradient that is not finite counts as 0, and so does the
    gradient of a case on which transforms, network or loss fail, or memory is exhausted: the site's own log
    counts them, and the round continues. Losses are ignored. The number of steps and the site's weight depend
    on the number of cases, not on the number of their slices. The network's buffers are restored after every
    case. The duration of a round is not covered.

    ``clip`` is C, ``noise`` is σ; ``spend`` is called with the number of steps and q before the first step of
    a round. Refused is what lets a case change more than its own gradient: batch norm, methods with terms,
    steps, layers or mixtures, methods that normalise with the site's own statistics without noise, and low
    precision.

    Deviations:
        The paper draws samples; here cases are drawn, since a patient is a case and not a slice. The loss of
        each case is computed separately: MONAI's overlap losses would otherwise be over the whole batch.
        Opacus, whose accounting this follows, computes the gradients of single images in one pass of a batch.
        That relies on each layer to keep the images of a batch separate, needs a formula for each kind of
        layer, and was 1.1 to 6 times slower for U-Nets on a CPU.
    """

    private: ClassVar[bool] = True

    def __init__(
        self, model: SiteModel, *, clip: float, noise: float, spend: Callable[[int, float], None]
    ) -> None:
        super().__init__(model)
        self.clip, self.noise, self.spend = clip, noise, spend
        self.random: random.Random = secrets.SystemRandom()
        for reason in self._unbounded(model.composition.methods):
            raise self._refused(reason)

    def _unbounded(self, methods: Sequence[Method]) -> Iterator[str]:
        """Yield the reasons why one case may change more than its own gradient."""
        for name, module in self.network.named_modules():
            if isinstance(module, _BatchNorm) or (
                isinstance(module, _NormBase) and module.track_running_stats
            ):
                yield (
                    f"the network has batch norm ({name}), which mixes the images of a batch: take instance "
                    'or group norm, for instance --network-args \'{"norm": "instance"}\''
                )
        for method in methods:
            part = self.parts[method.name]
            layers = type(method).prepare_network is not Method.prepare_network
            if overridden(part, _HOOKS) or layers or method.epochs_before_test:
                yield f"nothing bounds what one case changes in the local training of {method.name}"
            if part.uses_unsent_statistics:  # one case moves the gradients of all others
                yield (
                    f"{method.name} normalises with statistics of all the site's images, which one case "
                    "changes: take fedrdn, whose statistics get noise, or leave it out"
                )
        if self.config.precision == "bfloat16":
            yield "precision is bfloat16, and float32 is needed"

    def _refused(self, reason: str) -> ConfigError:
        return ConfigError(
            f"site {self.folder.name}: it trains with differential privacy (sgd_noise_multiplier of its "
            f"privacy policy), and {reason}"
        )

    def try_out(self, samples: SiteSamples) -> None:
        """Compute a gradient of noise in the most frequent shape of the site's images."""
        training, task = _training(samples), self.task
        # Without the methods' transforms, which may need their exchange.
        before, after, seed = Compose(list(task.transforms())), Compose([]), self.random.getrandbits(32)
        dataset = TrainingDataset(training, before, task.augmentation(), after, seed)
        try:
            with self.own_random_numbers(), self._own_buffers():
                self._pass(task.collate(dataset.transformed([training.noise()])))
        except Exception as error:
            reason = withheld(first_line(error).rstrip("."))
            raise self._refused(
                f"{self.config.network} cannot be trained on one case at a time ({reason}); no budget was "
                "spent on it"
            ) from error
        finally:
            self.network.zero_grad(set_to_none=True)

    def count(self, samples: SiteSamples) -> int:
        """Return the number of cases: the number of slices is not public."""
        return len(_training(samples).stored)

    def batches(self, samples: SiteSamples, dataset: Any, seed: int) -> Any:
        """Return the sets of cases of an epoch, drawn without a seed."""
        training = _training(samples)
        if not isinstance(dataset, TrainingDataset):
            raise self._refused("the images are not only this site's")
        return _CaseDraws(training, dataset, self.task.collate, self.config.batch_size, self.random)

    def run(
        self, loader: Any, round_: LocalRound, should_stop: Callable[[], bool] = lambda: False
    ) -> list[float]:
        """Enter the round in the ledger, then train; return no loss: a case's influence on it has no bound.

        A round that breaks off stays entered. Its repetition draws new sets and noise, and is entered too.
        """
        steps = round_.steps or round_.epochs * len(loader)
        trained = [p for p in self.network.parameters() if p.requires_grad]
        optimiser = self.optimiser(trained, round_.number)
        self.spend(steps, loader.rate)
        self.census.all_steps()  # which cases were drawn is secret
        self.network.train()
        drawn, failed, reason = 0, 0, ""
        with _own_global_random_numbers():
            for _ in range(steps):
                self.check_stop(should_stop)
                total = [torch.zeros_like(p, dtype=torch.float64) for p in trained]
                for case in loader.draw():
                    drawn += 1
                    try:
                        self._add(case, total, trained)
                    except Exception as error:  # of any kind: it would reveal the case
                        failed, reason = failed + 1, first_line(error)
                for parameter, clipped in zip(trained, total, strict=True):
                    noise = secret_normal(parameter.shape).to(clipped) * (self.noise * self.clip)
                    parameter.grad = ((clipped + noise) / loader.expected).to(parameter.dtype)
                optimiser.step()
        self.network.zero_grad(set_to_none=True)
        if failed:
            _log.warning(
                "site %s: %d of %d cases that were drawn in round %d added nothing to the training, the last "
                "one since %s; the server is not told",
                self.folder.name,
                failed,
                drawn,
                round_.number,
                reason,
            )
        return []

    def _add(self, case: Callable[[], Sample], total: list[Tensor], trained: list[nn.Parameter]) -> None:
        """Add the clipped gradient of one case; add nothing if an exception is raised."""
        with self._own_buffers():
            self._reseed()
            self._pass(case())
        gradients = [None if p.grad is None else p.grad.double() for p in trained]
        # Squares of float32 cannot overflow in float64.
        square = float(sum(float(g.square().sum()) for g in gradients if g is not None))
        if not math.isfinite(square):
            raise MedFedAugError("its gradient is not finite")
        scale = min(1.0, self.clip / math.sqrt(square)) if square else 1.0
        for clipped, gradient in zip(total, gradients, strict=True):
            if gradient is not None:
                clipped.add_(gradient, alpha=scale)

    def _reseed(self) -> None:
        """Reseed all global generators: torch's for dropout, NumPy's and Python's for other packages."""
        torch.default_generator.manual_seed(self.random.getrandbits(63))
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                torch.cuda.manual_seed(self.random.getrandbits(63))
        np.random.seed(self.random.getrandbits(32))
        random.seed(self.random.getrandbits(64))

    def _pass(self, batch: Sample) -> None:
        """Compute the gradient of one case, which is the whole batch."""
        self.network.train()
        self.network.zero_grad(set_to_none=True)
        inputs, targets = on_device(batch, self.device)
        self.criterion(self.network(inputs), targets).backward()

    @contextmanager
    def _own_buffers(self) -> Iterator[None]:
        before = {name: value.clone() for name, value in self.network.named_buffers()}
        try:
            yield
        finally:
            with torch.no_grad():
                for name, value in self.network.named_buffers():
                    value.copy_(before[name])


def _training(samples: SiteSamples) -> TrainingSamples:
    training = samples.training()
    assert isinstance(training, TrainingSamples)  # others come with a custom loop
    return training


@contextmanager
def _own_global_random_numbers() -> Iterator[None]:
    numpy_state, python_state = np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        np.random.set_state(numpy_state)
        random.setstate(python_state)


class _CaseDraws:
    """Draws about ``size`` cases for a step, each with one random sample and separate random numbers."""

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
        return self._steps

    def draw(self) -> list[Callable[[], Sample]]:
        """Draw the cases of a step, each as a function that makes its batch; skip cases without samples."""
        drawn = [case for case in self.ranges if self.random.random() < self.rate and len(case)]
        return [lambda case=case: self._batch(case) for case in drawn]  # type: ignore[misc]

    def _batch(self, case: range) -> Sample:
        index, seed = self.random.choice(case), self.random.getrandbits(32)
        self.dataset.reseed(seed)
        return self.collate([self.dataset[index]])
