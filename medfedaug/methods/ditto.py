"""Ditto: each site has a personal model close to the global one."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from medfedaug.errors import MedFedAugError
from medfedaug.methods.arguments import NotNegative
from medfedaug.methods.base import Method, Payload, SiteContext, SitePart, Step, shared_parameters
from medfedaug.methods.site_parts import MeasuredSite
from medfedaug.models.entries import call_with, shared_by_name, trained_entries


class Ditto(Method):
    """A personal model for each site and a global model (Li, Hu, Beirami and Smith, ICML 2021).

    The global model is trained and averaged as without Ditto. Each site also trains v, which never leaves it,
    for ::

        min_v hₖ(v; wᵗ) = Fₖ(v) + (λ/2) ‖v − wᵗ‖²,   v ← v − η (∇Fₖ(v) + λ (v − wᵗ))

    (Eq. 1 and Algorithm 1), with the loss Fₖ of the site and the global model wᵗ of this
    round. Validation and test score a site with its personal model, so that these select the round; a site
    that did not train is scored with the global model, which is bit for bit that of a run without Ditto.

    Only the model leaves a site. A step costs twice as much.

    Args:
        weight: λ. With 0 each personal model is trained only by its site.

    Raises:
        MedFedAugError: when the loss of a personal model is not finite.

    Deviations:
        In the paper sites choose λ by validation, from 0.1, 1 and 2 without attacks, and use 1 with little
        validation data; here all sites have the same λ. v takes as many steps as the global model, on the
        same batches, with a new optimiser of the run in every round; the paper leaves the number s of steps
        free. v starts as the first global model that a site receives. The term is over the averaged trainable
        parameters; running statistics come from v's own passes. F_k is the task's loss: loss terms and
        gradient corrections of other methods act only on the global model, their layers and images on both.
    """

    name = "ditto"
    requires = frozenset({"averaged_parameters", "complete_state_dict", "separate_sites"})
    provides = frozenset({"personal_model"})

    def __init__(self, weight: NotNegative = 1.0) -> None:
        self.weight = weight

    def at_site(self, context: SiteContext) -> SitePart:
        return DittoSite(self.weight, context)


class DittoSite(MeasuredSite):
    """The personal model and its optimiser.

    Attributes:
        own: all entries of the personal model; empty before the site has trained.
    """

    measured = ("loss",)

    def __init__(self, weight: float, context: SiteContext) -> None:
        self.weight, self.context = weight, context
        self.near = list(shared_parameters(context, Ditto.name))
        self.own: Payload = {}
        self._anchor: Payload = {}
        self._trained: list[Tensor] = []
        self._optimiser: torch.optim.Optimizer | None = None

    def start_round(self) -> None:
        """Keep the global model of the round, and make an optimiser for the personal model."""
        network = self.context.network
        state = {key: value.detach().clone() for key, value in network.state_dict().items()}
        if not self.own:
            self.own = {key: value.clone() for key, value in state.items()}
        self.own = shared_by_name(network, self.own)
        self._anchor = {key: state[key] for key in self.near}
        self._trained = [self.own[name].requires_grad_() for name in trained_entries(network)]
        self._optimiser = self.context.optimiser(self._trained)
        super().start_round()

    def after_step(self, step: Step) -> None:
        """Take the same step with the personal model."""
        assert self._optimiser is not None
        # Buffers outside of the state dict must summarise the passes of the global model alone.
        buffers = {key: value.clone() for key, value in step.network.named_buffers() if key not in self.own}
        # This pass must not change the draws in passes of the global model.
        with torch.random.fork_rng(devices=[step.inputs.device] if step.inputs.is_cuda else []):
            outputs = call_with(step.network, {**buffers, **self.own}, step.inputs)
            loss = step.batch_loss(outputs)
        distance = torch.stack([(self.own[key] - w).square().sum() for key, w in self._anchor.items()]).sum()
        loss = loss + self.weight / 2 * distance
        gradients = torch.autograd.grad(loss, self._trained, allow_unused=True)
        for parameter, gradient in zip(self._trained, gradients, strict=True):
            parameter.grad = gradient
        self._optimiser.step()
        self.measure(loss)

    def end_round(self) -> None:
        for parameter in self._trained:
            parameter.grad = None
            parameter.requires_grad_(False)
        self._optimiser, self._anchor = None, {}
        loss = self.metrics().get("loss", 0.0)
        if not math.isfinite(loss):
            raise MedFedAugError(
                f"site {self.context.name}: the loss of ditto's personal model is {loss}; lower the learning "
                "rate or ditto.weight"
            )

    @contextmanager
    def scoring(self) -> Iterator[None]:
        """Put the personal model into the network."""
        network = self.context.network
        if not self.own:
            yield
            return
        before = {key: value.clone() for key, value in network.state_dict().items()}
        network.load_state_dict(self.own)
        try:
            yield
        finally:
            network.load_state_dict(before)

    def state(self) -> Payload:
        return self.own

    def restore(self, state: Payload) -> None:
        self.own = {key: value.to(self.context.device, copy=True) for key, value in state.items()}
