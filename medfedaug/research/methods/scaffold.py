"""SCAFFOLD: control variates against the drift of the sites."""

from typing import Any

import torch
from torch import Tensor

from medfedaug.config.kinds import WEIGHTS
from medfedaug.methods.base import Method, ServerExchange, SiteExchange, SitePart, shared_parameters
from medfedaug.methods.contexts import Payload, ServerContext, SiteContext, Step, shapes_of, zeros


class Scaffold(Method):
    """Stochastic controlled averaging (Karimireddy et al., ICML 2020, Algorithm 1, option II).

    A site steps along g − cᵢ + c instead of its gradient g, with its control variate cᵢ and the federation's
    c. After K local steps

        cᵢ⁺ = cᵢ − c + (x − yᵢ)/(Kη),    c ← c + Σᵢ pᵢ (cᵢ⁺ − cᵢ),

    with the local model yᵢ and the global model x. The sum is over the sites of the round; pᵢ is a site's
    share among all training sites.

    Exchange, every round: cᵢ⁺ − cᵢ up and c down, each of the size of the parameters.

    Deviations:
        (x − yᵢ)/(Kη) is the mean of the steps of plain SGD, so that cᵢ⁺ is the mean of the gradients g. The
        site computes this mean, which is also defined for momentum and Adam. pᵢ is 1/N in the paper, with
        equal weights; here it is the site's weight in the average, so that c is the mean of the cᵢ as the
        model is the mean of the models. The global step size is 1, as in the paper's experiments. Gradients
        are corrected before the optimiser's step. Control variates are float32, at sites and in messages. A
        site does not know whether its update was used: after a late one, c lacks the change of its cᵢ.
    """

    name = "scaffold"
    requires = frozenset({"averaged_parameters"})

    def at_site(self, context: SiteContext) -> SitePart:
        return ScaffoldSite(context)

    def every_round(self, context: ServerContext) -> ServerExchange:
        return ScaffoldServer(context)


class ScaffoldSite(SitePart, SiteExchange):
    def __init__(self, context: SiteContext) -> None:
        self.every_round, self.census = self, context.census
        self.parameters = shared_parameters(context, Scaffold.name)
        self.own: Payload = self._zeros()
        self.common: Payload = self._zeros()

    def _zeros(self) -> Payload:
        return {key: torch.zeros_like(p, requires_grad=False) for key, p in self.parameters.items()}

    def start_round(self) -> None:
        self.total, self.steps = self._zeros(), next(iter(self.own.values())).new_zeros(())

    @torch.no_grad()
    def before_step(self, step: Step) -> None:
        """Replace the gradient g by g − cᵢ + c."""
        self.steps += 1
        for key, parameter in self.parameters.items():
            if parameter.grad is None:
                continue
            self.total[key] += parameter.grad
            parameter.grad += self.common[key] - self.own[key]

    def end_round(self) -> None:
        """Replace cᵢ by cᵢ⁺, the mean gradient of the round."""
        before, self.own = self.own, {key: total / self.steps for key, total in self.total.items()}
        self.change = {key: self.own[key] - before[key] for key in before}

    def collect(self) -> Payload:
        return {key: self.census.over_steps(change) for key, change in self.change.items()}

    def apply(self, payload: Payload) -> None:
        self.common = {key: value.to(self.parameters[key]) for key, value in payload.items()}

    def state(self) -> Payload:
        return self.own

    def restore(self, state: Payload) -> None:
        self.own = {key: value.to(self.parameters[key], copy=True) for key, value in state.items()}


class ScaffoldServer(ServerExchange):
    """The server's half, which keeps Σᵢ wᵢcᵢ over all sites and adds the changes of each round."""

    def __init__(self, context: ServerContext) -> None:
        self.weights = context.weights
        self.shapes = shapes_of(shared_parameters(context, Scaffold.name))
        self.kinds = dict.fromkeys(self.shapes, WEIGHTS)
        self.total = zeros(self.shapes)

    def accept(self, site: str, payload: Payload, weight: float = 1.0) -> None:
        weight = self.weights()[site]
        for key, value in payload.items():
            self.total[key].add_(value.double(), alpha=weight)

    def result(self) -> Payload:
        """Return c, the weighted mean of the sites' cᵢ."""
        everything = sum(self.weights().values())
        return {key: (total / everything).to(torch.float32) for key, total in self.total.items()}

    def summary(self) -> dict[str, Any]:
        norms: list[Tensor] = [value.norm() for value in self.result().values()]
        return {"control": float(torch.stack(norms).norm())}

    def state(self) -> Payload:
        return self.total

    def restore(self, state: Payload) -> None:
        self.total = {key: value.clone() for key, value in state.items()}
