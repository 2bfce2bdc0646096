"""FedRoD: a generic head, robust to a site's class balance, and a personal head."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from medfedaug import functional as F
from medfedaug.methods.arguments import NotNegative
from medfedaug.methods.base import Method, Payload, SiteContext, SitePart, Step
from medfedaug.methods.class_features import linear_head

_ABSENT = -1e4  # in place of log 0; its exponential is 0


class FedRoD(Method):
    """Federated robust decoupling (Chen and Chao, ICLR 2022), with the linear personal head.

    The network, features z and last layer g, is averaged, and trained with the balanced softmax loss ::

        ℓ_BSM = −log(n_y^γ exp(g_y) / (Σ_c n_c^γ exp(g_c)))

    with the site's number ``n_c`` of training images of class c. Each site also trains a personal head h,
    a linear layer on the same features, which never leaves it, with the task's loss of ::

        g(z) + h(z)

    without a gradient for z and g. Validation and test score a site with g + h (the paper's personalised
    model), and a site that did not train with g, the paper's generic model.

    Only the model leaves a site.

    Args:
        gamma: γ. With 0 the network is trained as by FedAvg.
        head: dotted name of the last layer, if it is not the last one in the network's order.

    Raises:
        ConfigError: for a negative ``gamma``, for a network that does not end in a fully connected layer, and
            for segmentation.

    Deviations:
        FED-ROD (hyper), in which a network that all sites train makes h from the class counts, is missing. h
        starts at zero, so that a site starts with the generic model. The run's optimiser, made anew in every
        round, steps h, on the features of the network's training pass. A class without images has n_c = 0
        and leaves the sum. The shift of g by γ log n applies to any loss of the task; the equation shows
        cross-entropy. The authors published no code; the equations above are from public libraries
        (fluke with γ = 1, FL-bench), which agree with each other.
    """

    name = "fedrod"
    tasks = ("classification",)
    requires = frozenset({"labels", "separate_sites"})
    provides = frozenset({"personal_model"})
    excludes = frozenset({"complete_state_dict"})

    def __init__(self, gamma: NotNegative = 1.0, head: str | None = None) -> None:
        self.gamma, self.head = gamma, head

    def prepare_network(self, network: nn.Module) -> nn.Module:
        """Check that the network ends in a fully connected layer."""
        linear_head(network, self.head, self.name)
        return network

    def at_site(self, context: SiteContext) -> SitePart:
        return FedRoDSite(self, context)


class FedRoDSite(SitePart):
    """The personal head h, ``None`` before the site has trained, and the counts of the classes."""

    def __init__(self, method: FedRoD, context: SiteContext) -> None:
        self.method, self.context = method, context
        self.head = linear_head(context.network, method.head, method.name)
        self.personal: nn.Linear | None = None
        self._shift: Tensor | None = None
        self._features: Tensor | None = None
        self._pass: tuple[Tensor, Tensor] | None = None
        self._optimiser: torch.optim.Optimizer | None = None
        self.head.register_forward_pre_hook(self._keep)

    def _keep(self, _head: nn.Module, args: tuple[Any, ...]) -> None:
        self._features = F.working_precision(args[0]).detach()

    def _begin(self) -> nn.Linear:
        """Make a head of zeros, without a random draw."""
        head: nn.Linear = nn.utils.skip_init(nn.Linear, self.head.in_features, self.head.out_features)
        head = head.to(self.head.weight)
        with torch.no_grad():
            for parameter in head.parameters():
                parameter.zero_()
        return head

    def _log_powers(self) -> Tensor:
        task = self.context.task
        assert task is not None
        batches = self.context.training_batches()
        counts = torch.stack([task.probabilities(y).sum(dim=0).double() for _, y in batches]).sum(dim=0)
        shift = self.method.gamma * counts.log()  # 0⁰ is 1, and 0 to any other power 0
        return shift.nan_to_num(nan=0.0, neginf=_ABSENT)

    def start_round(self) -> None:
        if self._shift is None:
            self._shift = self._log_powers().to(self.head.weight)
        if self.personal is None:
            self.personal = self._begin()
        self._optimiser = self.context.optimiser(self.personal.parameters())
        self._pass = None

    def loss(self, step: Step) -> Tensor:
        """Return the term that turns the task's loss into the loss of the shifted outputs."""
        assert self._shift is not None
        if self._pass is None:  # otherwise this call is for gradients at other weights
            assert self._features is not None
            self._pass = (self._features, step.outputs.detach())
        return step.criterion(step.outputs + self._shift, step.targets) - step.task_loss

    def after_step(self, step: Step) -> None:
        assert self.personal is not None
        assert self._pass is not None
        assert self._optimiser is not None
        (features, outputs), self._pass = self._pass, None
        self.personal.zero_grad(set_to_none=True)
        step.criterion(outputs + self.personal(features), step.targets).backward()
        self._optimiser.step()

    @contextmanager
    def scoring(self) -> Iterator[None]:
        """Let the last layer return g + h."""
        personal = self.personal
        if personal is None:
            yield
            return
        handle = self.head.register_forward_hook(
            lambda _head, args, output: output + personal(F.working_precision(args[0])).to(output)
        )
        try:
            yield
        finally:
            handle.remove()

    def state(self) -> Payload:
        return {} if self.personal is None else dict(self.personal.state_dict())

    def restore(self, state: Payload) -> None:
        self.personal = self._begin()
        self.personal.load_state_dict(state)
