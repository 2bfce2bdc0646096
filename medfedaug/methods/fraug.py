"""FRAug: synthetic embeddings from a shared generator and a network that each site keeps."""

import copy
from typing import Annotated, Any

import torch
from annotated_types import Interval
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from medfedaug import functional as F
from medfedaug.methods.arguments import AtLeastOne, Count, NotNegative, Positive
from medfedaug.methods.base import Method, ServerExchange, SitePart
from medfedaug.methods.contexts import Payload, ServerContext, SiteContext, Step
from medfedaug.methods.exchanges import AveragedParameters, AverageServer
from medfedaug.methods.site_parts import MeasuredSite, linear_head
from medfedaug.models.entries import state_entries


class Generator(nn.Module):
    """g(z, y): client-agnostic residuals of embeddings, a perceptron of two layers.

    ``noise`` is the size of z, y is given one-hot, and ``hidden`` is the width of the hidden layer.
    """

    def __init__(self, noise: int, classes: int, hidden: int, embedding: int) -> None:
        super().__init__()
        self.noise, self.classes = noise, classes
        self.layers = _perceptron(noise + classes, hidden, embedding)

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        """Return residuals, (N, embedding), for noise (N, noise) and classes (N,)."""
        # `one_hot` of PyTorch reads the largest class.
        one_hot = (y[:, None] == torch.arange(self.classes, device=y.device)).to(z)
        residuals: Tensor = self.layers(torch.cat([z, one_hot], dim=1))
        return residuals


def _perceptron(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))


class FRAug(Method):
    """Federated representation augmentation, for classification.

    Chen et al., "FRAug: Tackling Federated Learning with Non-IID Features via Representation Augmentation".
    The head h is trained on real and on synthetic embeddings (Eq. 1-3)::

        û = u + λ_syn m(g(z, y)),   û_c = ū_c + λ_syn m(g(z′, c)),
        L_syn = CE(h(û), y) + Σ_c CE(h(û_c), c)

    with z ~ N(0, I), the generator g that all sites share, the transformation network m (RTNet) that each
    site keeps, and prototypes ``ū_c``, moving averages of a site's embeddings by class (Eq. 4).
    After each step of the classifier, g and m take a step with the classifier fixed (Eq. 5, 6)::

        L_gen = CE(h(û), y) − α MMD(û, u),
        L_rt = −H(h(û)) − Σ_c H(h(û_c)) + β (MMD(û, u) + Σ_c MMD(û_c, ū_c))

    Batch norms, chosen by module type, stay at their site. Embeddings are the input of the last layer.

    Exchange, every round, in simulations only, since it may be about a class of one patient: the generator's
    parameters up, their average down. RTNet, prototypes and the count of steps stay at the site, across
    rounds and restarts.

    Args:
        alpha: α of Eq. 5.
        beta: β of Eq. 6.
        lambda_syn: λ_syn after its ramp.
        ramp_steps: local steps of a site over which λ_syn and the prototypes' rate rise (`F.ramp_up`).
        prototype_rate: λ_c of Eq. 4 after its ramp.
        noise: size of z.
        hidden: width of g's and m's hidden layer.
        learning_rate: of g and m; the optimiser is SGD, made anew in every round.

    Deviations:
        Sizes, rates, α, β and the kernel are in an appendix outside of the article; the values and the
        Gaussian kernel here (`F.gaussian_mmd`) are our choices. Eq. 4 as printed pulls the prototype of a
        class that the batch lacks towards zero: here it stays. Its first value is the mean of the first batch
        with the class, and classes not yet seen contribute nothing. One z' is drawn per class and step. g and
        m learn from the embeddings before the classifier's step, with its new head: another pass through the
        network would only change them by that step. With FedSAM, whose second pass is at weights nearby,
        prototypes, g and m use the embeddings of the first. The public code draws z uniformly. The algorithm
        averages models and generators with 1/K for each of the K sites; here both have the run's weights, by
        default the sites' numbers of samples (``weighting="uniform"`` is 1/K). An unseen site has no batch
        norms and gets no score.
    """

    name = "fraug"
    requires = frozenset({"labels", "norm_layers"})
    excludes = frozenset({"counted_patients"})
    tasks = ("classification",)

    def __init__(
        self,
        alpha: NotNegative = 1.0,
        beta: NotNegative = 1.0,
        lambda_syn: NotNegative = 1.0,
        ramp_steps: Count = 500,
        prototype_rate: Annotated[float, Interval(gt=0, le=1)] = 0.1,
        noise: AtLeastOne = 64,
        hidden: AtLeastOne = 256,
        learning_rate: Positive = 0.01,
    ) -> None:
        self.alpha, self.beta, self.lambda_syn, self.learning_rate = alpha, beta, lambda_syn, learning_rate
        self.ramp_steps, self.prototype_rate = ramp_steps, prototype_rate
        self.noise, self.hidden = noise, hidden
        self._generator: Generator | None = None

    def prepare_network(self, network: nn.Module) -> nn.Module:
        """Draw the generator's first weights from the run's seed, the same at all sites."""
        head = linear_head(network, self.name)
        self._generator = Generator(self.noise, head.out_features, self.hidden, head.in_features)
        return network

    def generator(self) -> Generator:
        """Return the generator with its initial weights."""
        assert self._generator is not None, "prepare_network comes first"
        return copy.deepcopy(self._generator)

    def local_entries(self, network: nn.Module) -> frozenset[str]:
        """Return the entries of batch norms, by module type; other norms are shared."""
        return state_entries(network, (_BatchNorm,))

    def at_site(self, context: SiteContext) -> SitePart:
        return FRAugSite(self, context.network)

    def every_round(self, context: ServerContext) -> ServerExchange:
        return AverageServer(self.generator().state_dict())


class FRAugSite(MeasuredSite, AveragedParameters):
    """The site's half: every step has the same shapes, so that none waits for a number from a GPU.

    The prototypes of all classes pass through both networks in one batch with the embeddings; a class not yet
    seen has weight 0.
    """

    measured = ("generator_loss", "rtnet_loss")

    def __init__(self, method: FRAug, network: nn.Module) -> None:
        self.method, self.head = method, linear_head(network, method.name)
        weight = self.head.weight
        classes, size = weight.shape
        self.generator = method.generator().to(weight)
        super().__init__(dict(self.generator.named_parameters()))
        # Made in the first training, with the site's random numbers.
        self.transformation: nn.Module | None = None
        self.means = weight.new_zeros(classes, size)
        self.seen = torch.zeros(classes, dtype=torch.bool, device=weight.device)
        self.steps = 0
        self._classes = torch.arange(classes, device=weight.device)
        self._optimisers: list[tuple[torch.optim.Optimizer, list[nn.Parameter]]] = []
        self._embeddings: Tensor | None = None
        self._real: Tensor | None = None
        self._synthetic: tuple[Tensor, Tensor] | None = None
        self.head.register_forward_pre_hook(self._keep)

    def _keep(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._embeddings = F.working_precision(args[0].detach()) if module.training else None

    def start_round(self) -> None:
        """Drop the optimisers; the first step makes new ones."""
        self._optimisers, self._real = [], None
        super().start_round()

    def _begin(self) -> None:
        size = self.head.in_features
        if self.transformation is None:
            self.transformation = _perceptron(size, self.method.hidden, size).to(self.head.weight)
        for module in (self.generator, self.transformation):
            parameters = list(module.parameters())
            optimiser = torch.optim.SGD(parameters, lr=self.method.learning_rate)
            self._optimisers.append((optimiser, parameters))

    def loss(self, step: Step) -> Tensor | None:
        """Return L_syn, which trains the head alone (Eq. 2)."""
        assert self._embeddings is not None
        if not self._optimisers:
            self._begin()
        real, self._embeddings = self._embeddings, None
        first = self._real is None  # otherwise this call is for gradients at other weights
        if first:
            self._real = real
            self._update_prototypes(real, step.targets)
        synthetic, weights = self._synthesise(real, step.targets), self._weights(len(real))
        if first:
            self._synthetic = synthetic, weights
        # Not through the module, whose hooks are for real embeddings.
        logits = nn.functional.linear(synthetic.detach(), self.head.weight, self.head.bias)
        labels = torch.cat([step.targets, self._classes])
        return weights @ nn.functional.cross_entropy(logits, labels, reduction="none")

    def after_step(self, step: Step) -> None:
        """Take one step of the generator and one of RTNet with the classifier fixed (Eq. 5 and 6)."""
        assert self._real is not None
        assert self._synthetic is not None
        losses = self.losses(self._real, step.targets, *self._synthetic)
        gradients = [
            torch.autograd.grad(losses[index], parameters, retain_graph=index == 0)
            for index, (_, parameters) in enumerate(self._optimisers)
        ]
        for (optimiser, parameters), gradient in zip(self._optimisers, gradients, strict=True):
            for parameter, value in zip(parameters, gradient, strict=True):
                parameter.grad = value
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        self.measure(*losses)
        self._real = self._synthetic = None
        self.steps += 1

    def losses(
        self, real: Tensor, labels: Tensor, synthetic: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return L_gen and L_rt (Eq. 5 and 6).

        Args:
            real: the embeddings u of a batch, (B, D).
            labels: their classes y, (B,).
            synthetic: û and û_c, (B + C, D).
            weights: of `_weights`.
        """
        method, count = self.method, len(real)
        # The spread of the real embeddings: half their mean squared distance is the sum of their variances.
        square = real.var(dim=0).sum().clamp(min=1e-12) if count > 1 else real.new_ones(())
        bias = None if self.head.bias is None else self.head.bias.detach()
        log = nn.functional.linear(synthetic, self.head.weight.detach(), bias).log_softmax(dim=1)
        entropies = -(log.exp() * log).sum(dim=1)
        distance = F.gaussian_mmd(synthetic[:count], real, square.sqrt())  # MMD(û, u)
        generating = nn.functional.nll_loss(log[:count], labels) - method.alpha * distance
        transforming = method.beta * distance - weights @ entropies
        # MMD(û_c, ū_c) of one embedding each: k(a, a) + k(b, b) - 2 k(a, b)
        kernel = ((synthetic[count:] - self.means).square().sum(dim=1) / (-2.0 * square)).exp()
        transforming = transforming + method.beta * (weights[count:] @ (2.0 - 2.0 * kernel))
        return generating, transforming

    def _weights(self, count: int) -> Tensor:
        """Return what each row of û and û_c counts in Eq. 2 and 6, (B + C,): means and sums over classes."""
        return torch.cat([self.means.new_full((count,), 1 / count), self.seen.to(self.means)])

    def _synthesise(self, real: Tensor, labels: Tensor) -> Tensor:
        """Return û of a batch and û_c of all classes (Eq. 3), (B + C, D)."""
        y = torch.cat([labels, self._classes])
        z = torch.randn(len(y), self.method.noise, device=real.device, dtype=real.dtype)
        assert self.transformation is not None
        residuals = self.transformation(self.generator(z, y))
        weight = self.method.lambda_syn * self._ramp()
        synthetic: Tensor = torch.cat([real, self.means]) + weight * residuals
        return synthetic

    def _update_prototypes(self, real: Tensor, labels: Tensor) -> None:
        """Update the prototypes of the batch's classes (Eq. 4)."""
        one_hot = (labels[:, None] == self._classes).to(real)
        counts = one_hot.sum(dim=0)
        present = counts > 0
        rate = self.method.prototype_rate * self._ramp()
        share = (present * torch.where(self.seen, rate, 1.0)).to(self.means)
        self.means.lerp_(one_hot.T @ real / counts.clamp(min=1.0)[:, None], share[:, None])
        self.seen.logical_or_(present)

    def _ramp(self) -> float:
        return F.ramp_up(self.steps, self.method.ramp_steps)

    def state(self) -> Payload:
        kept = {"means": self.means, "seen": self.seen, "steps": torch.as_tensor(self.steps)}
        if self.transformation is not None:
            kept.update({f"rtnet/{key}": value for key, value in self.transformation.state_dict().items()})
        return kept

    def restore(self, state: Payload) -> None:
        self.means.copy_(state["means"])
        self.seen.copy_(state["seen"])
        self.steps = int(state["steps"])
        kept = {key.removeprefix("rtnet/"): value for key, value in state.items() if key.startswith("rtnet/")}
        if kept:
            size = self.head.in_features
            self.transformation = _perceptron(size, self.method.hidden, size).to(self.head.weight)
            self.transformation.load_state_dict(kept)
