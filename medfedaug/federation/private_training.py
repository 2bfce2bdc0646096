"""DP-SGD: local training whose weights say little about any one case, by Opacus."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from monai.utils import CommonKeys as Keys
from opacus.grad_sample import GradSampleModule
from opacus.optimizers import DPOptimizer
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from medfedaug.errors import ConfigError
from medfedaug.federation.samples import SiteSamples, TrainingSamples
from medfedaug.federation.training import LocalRound, LocalTraining
from medfedaug.methods.base import Method, SitePart, Step, Targets
from medfedaug.streams import secret_normal

__all__ = ["PrivateTraining"]

# What a method does with images, gradients and weights: nothing bounds what one case changes there.
_HOOKS = (
    *("personalise", "scoring", "start_round", "end_round"),
    *("mix", "after_pass", "loss", "gradients", "before_step", "after_step"),
)


class PrivateTraining(LocalTraining):
    r"""Local training by DP-SGD (Abadi et al., CCS 2016).

    .. math:: g = \frac{1}{qn}\Big(\sum_{i \in S} g_i \min(1, C/\lVert g_i\rVert) + \sigma C\,\xi\Big),
        \qquad \xi \sim N(0, I)

    over a set S that each of the n cases is in with probability q, on its own and anew in every step, with
    one random sample (slice, patch) of a case, whose gradient is g_i. So a case, whatever the number of its
    samples, moves a step by at most C / (qn). q is the batch size divided by n, at most 1. The number of
    steps is that of ordinary training. The optimiser of the run takes g in place of its gradient.

    Sets, samples and noise come from the operating system: what follows from the seed of a run, which
    everybody knows, would hide nothing. A run with noise therefore never repeats.

    Args:
        methods: those of the run.
        clip: C.
        noise: σ.
        spend: called with the number of steps and q before the first step of a round; raises if the site's
            budget does not allow them.
        *args: of `LocalTraining`.
        **more: of `LocalTraining`.

    Raises:
        ConfigError: where one case changes what another one adds, or more than the gradient: batch norm,
            methods with terms, steps, layers or mixtures of their own, or that normalise with the site's own
            statistics without noise, and low precision.

    Deviations:
        The paper draws samples, here cases, since a patient is a case and not a slice. The loss of each
        sample is taken alone: MONAI's overlap losses would otherwise be over the whole batch.
    """

    def __init__(
        self,
        *args: Any,
        methods: Sequence[Method],
        clip: float,
        noise: float,
        spend: Callable[[int, float], None],
        **more: Any,
    ) -> None:
        super().__init__(*args, **more)
        self.clip, self.noise, self.spend = clip, noise, spend
        self._rate, self._expected = 1.0, 1.0
        self._check(methods)
        for module in self.network.modules():
            if getattr(module, "inplace", False):  # the hooks for gradients of single images need the input
                setattr(module, "inplace", False)  # noqa: B010, which types do not know of every module

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
            hooks = [hook for hook in _HOOKS if getattr(type(part), hook) is not getattr(SitePart, hook)]
            layers = type(method).prepare_network is not Method.prepare_network
            if hooks or layers or method.epochs_before_test:
                raise self._refused(
                    f"nothing bounds what one case changes in the local training of {method.name}"
                )
            if part.uses_unsent_statistics:  # one case moves the inputs, and so the gradients, of all others
                raise self._refused(
                    f"{method.name} normalises with statistics of all the site's images, which one case "
                    "changes: take fedrdn, whose statistics get noise, or leave it out"
                )
        if self.config.precision != "float32":
            raise self._refused(f"precision is {self.config.precision}, and float32 is needed")

    def _refused(self, reason: str) -> ConfigError:
        return ConfigError(
            f"site {self.folder.name}: it trains with differential privacy (sgd_noise_multiplier of its "
            f"privacy policy), and {reason}"
        )

    def batches(self, samples: SiteSamples, dataset: Any, seed: int) -> Iterable[Any]:
        """As many batches as an epoch has otherwise, each of one random sample of some random cases."""
        training, size = samples.training(), self.config.batch_size
        assert isinstance(training, TrainingSamples)  # others come with a loop of one's own
        cases = len(training.stored)
        self._rate = min(1.0, size / cases)
        self._expected = self._rate * cases
        return _CaseBatches(training, dataset, self.task.collate, self._rate, -(-len(training) // size))

    def run(
        self,
        loader: Any,
        round_: LocalRound,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> list[float]:
        """Train, after what it spends was entered.

        Returns:
            No loss: nothing bounds what a case changes in it.
        """
        self.spend(round_.steps or round_.epochs * len(loader), self._rate)
        hooked = GradSampleModule(self.network, loss_reduction="sum", strict=False)
        try:
            super().run(loader, round_, should_stop)
        finally:
            hooked.to_standard_module()
        return []

    def optimiser(self, parameters: Iterable[Tensor], round_: int) -> torch.optim.Optimizer:
        """The run's optimiser, given clipped gradients with noise."""
        return _Noisy(
            super().optimiser(parameters, round_),
            noise_multiplier=self.noise,
            max_grad_norm=self.clip,
            expected_batch_size=self._expected,
        )

    def _backward(self, inputs: Tensor, targets: Tensor, mixed: Targets) -> tuple[Step, Tensor]:
        """Compute the gradient of each image's own loss."""
        trained = [p for p in self.network.parameters() if p.requires_grad]
        for parameter in trained:
            nobody = None if len(inputs) else parameter.new_zeros(0, *parameter.shape)
            setattr(parameter, "grad_sample", nobody)  # noqa: B010, Opacus' own
        if not len(inputs):  # nobody was drawn: a step of noise alone
            return Step(self.network, inputs, targets, inputs, self.criterion), inputs.new_zeros(())
        outputs = self._forward(inputs)
        single = [slice(i, i + 1) for i in range(len(inputs))]
        losses = torch.stack([self.criterion(outputs[one], targets[one]) for one in single])
        self.network.zero_grad(set_to_none=True)
        losses.sum().backward()
        if any(getattr(parameter, "grad_sample", None) is None for parameter in trained):
            raise self._refused("a parameter of the network has no gradient of each image's own")
        return Step(self.network, inputs, targets, outputs, self.criterion), losses.detach().mean()


class _Noisy(DPOptimizer):
    """Opacus' optimiser with noise that no seed gives."""

    def add_noise(self) -> None:
        """Put the clipped sum with noise in the place of each gradient."""
        std = self.noise_multiplier * self.max_grad_norm
        for parameter in self.params:
            noise = secret_normal(parameter.shape).to(parameter) * std
            parameter.grad = (parameter.summed_grad + noise).view_as(parameter)

    def step(self, closure: Any = None) -> Any:
        """A step, after which nothing of the gradients is left."""
        found = super().step(closure)
        self.zero_grad(set_to_none=True)
        return found


class _CaseBatches:
    """Batches of one random sample of each of some random cases; a batch may be empty.

    Args:
        samples: of all cases.
        dataset: the same, transformed.
        collate: makes a batch.
        rate: the probability of a case.
        length: the number of batches.
    """

    def __init__(
        self, samples: TrainingSamples, dataset: Any, collate: Callable[..., Any], rate: float, length: int
    ) -> None:
        self.samples, self.dataset, self.collate = samples, dataset, collate
        self.rate, self.length = rate, length
        self.random = secrets.SystemRandom()

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        ranges = self.samples.ranges()
        for _ in range(self.length):
            drawn = [one for one in ranges if self.random.random() < self.rate and len(one)]
            items = [self.dataset[self.random.choice(one)] for one in drawn]
            batch = self.collate(items or [self.dataset[0]])
            yield batch if items else {key: batch[key][:0] for key in (Keys.IMAGE, Keys.LABEL)}
