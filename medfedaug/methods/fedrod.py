"""FedRoD: a generic head that does not mind which classes a site has, and a personal head beside it."""

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
    r"""Federated robust decoupling (Chen and Chao, ICLR 2022), with the linear personal head.

    The network, features z and its last layer g, is trained and averaged with the balanced softmax loss

    .. math:: \ell_{BSM} = -\log \frac{n_y^\gamma \exp(g_y)}{\sum_c n_c^\gamma \exp(g_c)}

    where :math:`n_c` counts the site's training images of class c. Beside it each site trains a personal
    head h, a linear layer on the same features, which never leaves it, with the task's loss of

    .. math:: g(z) + h(z)

    whose gradient reaches neither z nor g. A site is scored with g + h, in validation as in the test (the
    paper's personalised model); a site that did not train, with g, the paper's generic model.

    Nothing leaves a site beside the model.

    Args:
        gamma: γ. With 0 the network is trained as by FedAvg.
        head: dotted name of the last layer, where the order of the network's modules says something else.

    Raises:
        ConfigError: for a negative ``gamma``, for a network that does not end in a fully connected layer, and
            for segmentation.

    Deviations:
        The paper also makes h from the counts of the classes by a network that all sites train together
        (FED-ROD (hyper)), which is not here. h begins at zero, so that a site begins with the generic model;
        it is stepped with the run's optimiser, made anew in every round, along the features of the pass that
        trained the network, before its step. A class without images has n_c = 0: it leaves the sum.
        The shift of g by γ log n is applied to the task's loss, whichever that is: the equation is its
        cross-entropy. The authors published no code; the equations above are those that public libraries
        have (fluke with γ = 1, FL-bench), which agree with each other.
    """

    name = "fedrod"
    capturable = True
    tasks = ("classification",)
    requires = frozenset({"labels", "separate_sites"})
    provides = frozenset({"personal_model"})
    excludes = frozenset({"complete_state_dict"})

    def __init__(self, gamma: NotNegative = 1.0, head: str | None = None) -> None:
        self.gamma, self.head = gamma, head

    def prepare_network(self, network: nn.Module) -> nn.Module:
        """Check that there is a last layer beside which another can stand."""
        linear_head(network, self.head, self.name)
        return network

    def at_site(self, context: SiteContext) -> SitePart:
        return FedRoDSite(self, context)


class FedRoDSite(SitePart):
    """The personal head, and the counts of the classes.

    Attributes:
        personal: h; ``None`` before the site has trained.
    """

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
        """A head of zeros, which draws no random numbers."""
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
        """Count the classes once, and make an optimiser for the personal head."""
        if self._shift is None:
            self._shift = self._log_powers().to(self.head.weight)
        if self.personal is None:
            self.personal = self._begin()
        self._optimiser = self.context.optimiser(self.personal.parameters())
        self._pass = None

    def loss(self, step: Step) -> Tensor:
        """Return the term that turns the task's loss into that of the shifted outputs."""
        assert self._shift is not None
        if self._pass is None:  # else the gradients are taken again at other weights
            assert self._features is not None
            self._pass = (self._features, step.outputs.detach())
        return step.criterion(step.outputs + self._shift, step.targets) - step.task_loss

    def after_step(self, step: Step) -> None:
        """Take one step of the personal head."""
        assert self.personal is not None
        assert self._pass is not None
        assert self._optimiser is not None
        (features, outputs), self._pass = self._pass, None
        self.personal.zero_grad(set_to_none=True)
        step.criterion(outputs + self.personal(features), step.targets).backward()
        self._optimiser.step()

    @contextmanager
    def scoring(self) -> Iterator[None]:
        """The output of the last layer is g + h."""
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
        """The personal head."""
        return {} if self.personal is None else dict(self.personal.state_dict())

    def restore(self, state: Payload) -> None:
        self.personal = self._begin()
        self.personal.load_state_dict(state)
