"""SelfReg: features and outputs close to the other images of the class."""

import copy

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from medfedaug import functional as F
from medfedaug.methods.base import Method, ServerContext, ServerExchange, SiteContext, SitePart, Step
from medfedaug.methods.exchanges import AveragedParameters, AverageServer
from medfedaug.methods.site_parts import HeadInput, linear_head
from medfedaug.research.methods.mixup import draw_lambda

_MIXING = 0.5  # of Beta
_FEATURES = 0.3  # weight of the features' distances; the outputs' have weight 1


class SelfReg(Method):
    """Self-supervised contrastive regularisation (Kim et al., ICCV 2021), for classification.

    With features z, outputs o, a projection p = P(z) of three layers, and partners i, j of the same class,
    drawn for each image of the batch, and one λ ~ Beta(0.5, 0.5), ::

        D(u, v) = MSE(o, u) + 0.3 MSE(z, v),
        ℓ = CE + min(CE, 1) [λ D(oᵢ, pᵢ) + (1 − λ) D(λ oᵢ + (1 − λ) oⱼ, λ pᵢ + (1 − λ) pⱼ)]

    The factor min(CE, 1) has no gradient. P is not part of the model: scores do not use it.

    Exchange, every round: the weights of P, 8 D² + 15 D numbers, up; the averages down.

    Deviations:
        The equations are those of the authors' public code. Its curriculum over domains does not apply to a
        site with one domain; its average of the weights over the last steps is omitted. The run's optimiser,
        made anew in every round, steps P, whose batch norms use each batch's statistics.
    """

    name = "selfreg"
    tasks = ("classification",)
    requires = frozenset({"labels", "several_images"})

    def __init__(self) -> None:
        self._projection: nn.Sequential | None = None

    def prepare_network(self, network: nn.Module) -> nn.Module:
        """Draw the first weights of P from the run's seed, the same at all sites."""
        width = linear_head(network, self.name).in_features
        hidden = width if width == 2048 else 2 * width
        layers: list[nn.Module] = []
        for a, b in ((width, hidden), (hidden, hidden), (hidden, width)):
            layers += [nn.Linear(a, b), nn.BatchNorm1d(b, track_running_stats=False), nn.ReLU()]
        self._projection = nn.Sequential(*layers[:-1])
        return network

    def projection(self) -> nn.Sequential:
        """Return P with its initial weights."""
        assert self._projection is not None, "prepare_network comes first"
        return copy.deepcopy(self._projection)

    def at_site(self, context: SiteContext) -> SitePart:
        return SelfRegSite(self, context)

    def every_round(self, context: ServerContext) -> ServerExchange:
        return AverageServer(dict(self.projection().named_parameters()))


class SelfRegSite(AveragedParameters):
    """The site's half: the loss, and the steps of P."""

    def __init__(self, method: SelfReg, context: SiteContext) -> None:
        self.context, self.head_input = context, HeadInput(context.network)
        self.projection = method.projection().to(linear_head(context.network, method.name).weight)
        super().__init__(dict(self.projection.named_parameters()))
        self._optimiser: torch.optim.Optimizer | None = None

    def start_round(self) -> None:
        self._optimiser = self.context.optimiser(self.projection.parameters())

    def loss(self, step: Step) -> Tensor | None:
        """Return both distances; P gets its gradients with the network."""
        features = self.head_input.take()
        assert features is not None
        self.projection.zero_grad(set_to_none=True)  # of an earlier pass at other weights
        if len(features) < 2:
            return None
        outputs, projected = F.working_precision(step.outputs), self.projection(features)
        first, second, weight = _partners(step.targets), _partners(step.targets), draw_lambda(_MIXING)

        def distance(out: Tensor, projection: Tensor) -> Tensor:
            return mse_loss(outputs, out) + _FEATURES * mse_loss(features, projection)

        def mixed(values: Tensor) -> Tensor:
            return torch.lerp(values[second], values[first], weight)

        own, mix = distance(outputs[first], projected[first]), distance(mixed(outputs), mixed(projected))
        factor = step.task_loss.detach().clamp(max=1)
        return factor * (weight * own + (1 - weight) * mix)

    def after_step(self, step: Step) -> None:
        assert self._optimiser is not None
        self._optimiser.step()


def _partners(labels: Tensor) -> Tensor:
    """Return a random permutation within every class: the position of each image's partner."""
    drawn = labels.cpu() + torch.rand(len(labels), dtype=torch.float64)  # sorted by class, then by chance
    partners = torch.empty(len(labels), dtype=torch.long)
    partners[labels.cpu().argsort(stable=True)] = drawn.argsort()
    return partners.to(labels.device)
