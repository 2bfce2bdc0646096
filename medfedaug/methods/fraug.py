"""FRAug: synthetic embeddings from a shared generator and a network that each site keeps."""

from __future__ import annotations

import copy
from typing import Annotated, Any

import torch
from annotated_types import Interval
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from medfedaug import functional as F
from medfedaug.errors import ConfigError
from medfedaug.methods.arguments import AtLeastOne, Count, NotNegative, Positive
from medfedaug.methods.average import AverageServer
from medfedaug.methods.base import Method, ServerExchange, SiteExchange, SitePart
from medfedaug.methods.class_features import linear_head
from medfedaug.methods.contexts import Payload, ServerContext, SiteContext, Step
from medfedaug.methods.entries import state_entries
from medfedaug.methods.own_loss import RoundMeans


class Generator(nn.Module):
    """g(z, y): client-agnostic residuals of embeddings, a perceptron of two layers.

    Args:
        noise: size of z.
        classes: number of classes; y is given one-hot.
        hidden: width of the hidden layer.
        embedding: size of an embedding.
    """

    def __init__(self, noise: int, classes: int, hidden: int, embedding: int) -> None:
        super().__init__()
        self.noise, self.classes = noise, classes
        self.layers = _perceptron(noise + classes, hidden, embedding)

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        """Return residuals, (N, embedding), for noise (N, noise) and classes (N,)."""
        residuals: Tensor = self.layers(torch.cat([z, nn.functional.one_hot(y, self.classes).to(z)], dim=1))
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

    Exchange, every round: the generator's parameters up, their average down. RTNet, prototypes and the count
    of steps stay at the site, across rounds and restarts.

    Args:
        alpha: α of Eq. 5.
        beta: β of Eq. 6.
        lambda_syn: λ_syn after its ramp.
        ramp_steps: local steps of a site over which λ_syn and the prototypes' rate rise (`F.ramp_up`).
        prototype_rate: λ_c of Eq. 4 after its ramp.
        rtnet: use m; otherwise add the generator's residuals themselves (Table 3).
        embeddings: use û.
        prototypes: use û_c.
        smoothing: let λ_syn rise; otherwise it is constant.
        noise: size of z.
        hidden: width of g's and m's hidden layer.
        learning_rate: of g and m; the optimiser is SGD, made anew in every round.
        head: dotted name of the last layer, if it is not the last one in the network's order.

    Raises:
        ConfigError: for arguments out of range, and for a network that does not end in a fully connected
            layer: the paper has no equation for segmentation.

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
    capturable = True
    requires = frozenset({"labels", "norm_layers"})
    tasks = ("classification",)

    def __init__(
        self,
        alpha: NotNegative = 1.0,
        beta: NotNegative = 1.0,
        lambda_syn: NotNegative = 1.0,
        ramp_steps: Count = 500,
        prototype_rate: Annotated[float, Interval(gt=0, le=1)] = 0.1,
        rtnet: bool = True,
        embeddings: bool = True,
        prototypes: bool = True,
        smoothing: bool = True,
        noise: AtLeastOne = 64,
        hidden: AtLeastOne = 256,
        learning_rate: Positive = 0.01,
        head: str | None = None,
    ) -> None:
        if not (embeddings or prototypes):
            raise ConfigError("fraug: without embeddings and prototypes there is nothing to train on")
        self.alpha, self.beta, self.lambda_syn, self.learning_rate = alpha, beta, lambda_syn, learning_rate
        self.ramp_steps, self.prototype_rate, self.smoothing = ramp_steps, prototype_rate, smoothing
        self.rtnet, self.embeddings, self.prototypes = rtnet, embeddings, prototypes
        self.noise, self.hidden, self.head = noise, hidden, head
        self._generator: Generator | None = None

    def prepare_network(self, network: nn.Module) -> nn.Module:
        """Draw the generator's first weights from the run's seed, the same at all sites."""
        head = linear_head(network, self.head, self.name)
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
        device = linear_head(context.network, self.head, self.name).weight.device
        half = FRAugSite if device.type == "cpu" else FixedShapeSite
        return half(self, context.network)

    def every_round(self, context: ServerContext) -> ServerExchange:
        return AverageServer(self.generator().state_dict())


class FRAugSite(SitePart, SiteExchange):
    def __init__(self, method: FRAug, network: nn.Module) -> None:
        self.method, self.head = method, linear_head(network, method.head, method.name)
        weight = self.head.weight
        classes, size = weight.shape
        self.generator = method.generator().to(weight)
        # Made in the first training, with the site's random numbers.
        self.transformation: nn.Module | None = None
        self.means = weight.new_zeros(classes, size)
        self.seen = torch.zeros(classes, dtype=torch.bool, device=weight.device)
        self.steps: Any = 0
        self.every_round = self
        self._optimisers: list[tuple[torch.optim.Optimizer, list[nn.Parameter]]] = []
        self._embeddings: Tensor | None = None
        self._real: Tensor | None = None
        self._noise: dict[str, Tensor] = {}
        self._means = RoundMeans("generator_loss", *(["rtnet_loss"] if method.rtnet else []))
        self.head.register_forward_pre_hook(self._keep)

    def _keep(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._embeddings = F.working_precision(args[0].detach()) if module.training else None

    def start_round(self) -> None:
        """Drop the optimisers; the first step makes new ones."""
        self._optimisers, self._real = [], None
        self._means.clear()

    def continue_round(self) -> None:
        self._begin()

    def _begin(self) -> None:
        size = self.head.in_features
        if self.method.rtnet and self.transformation is None:
            self.transformation = _perceptron(size, self.method.hidden, size).to(self.head.weight)
        for module in (self.generator, self.transformation):
            if module is not None:
                parameters = list(module.parameters())
                optimiser = torch.optim.SGD(parameters, lr=self.method.learning_rate)
                self._optimisers.append((optimiser, parameters))

    def loss(self, step: Step) -> Tensor | None:
        """Return L_syn, which trains the head alone (Eq. 2)."""
        assert self._embeddings is not None
        if not self._optimisers:
            self._begin()
        real, self._embeddings = self._embeddings, None
        if self._real is None:  # otherwise this call is for gradients at other weights
            self._real = real
            self._update_prototypes(real, step.targets)
        number = {"embeddings": len(step.targets), "prototypes": int(self.seen.sum())}
        self._noise = {kind: self._draw(count, real) for kind, count in number.items()}
        with torch.no_grad():
            synthetic = self._synthesise(real, step.targets)
        total = real.new_zeros(())
        for kind, (embeddings, _, labels) in synthetic.items():
            if getattr(self.method, kind):
                # Not through the module, whose hooks are for real embeddings.
                logits = nn.functional.linear(embeddings, self.head.weight, self.head.bias)
                reduction = "mean" if kind == "embeddings" else "sum"
                total = total + nn.functional.cross_entropy(logits, labels, reduction=reduction)
        return total

    def _draw(self, count: int, like: Tensor) -> Tensor:
        return torch.randn(count, self.method.noise, device=like.device, dtype=like.dtype)

    def after_step(self, step: Step) -> None:
        """Take one step of the generator and one of RTNet with the classifier fixed (Eq. 5 and 6)."""
        assert self._real is not None
        losses = self.losses(self._real, step.targets)
        last = len(self._optimisers) - 1
        gradients = [
            torch.autograd.grad(losses[index], parameters, retain_graph=index < last)
            for index, (_, parameters) in enumerate(self._optimisers)
        ]
        for (optimiser, parameters), gradient in zip(self._optimisers, gradients, strict=True):
            for parameter, value in zip(parameters, gradient, strict=True):
                parameter.grad = value
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        self._means.add(*losses[: last + 1])
        self._real = None
        self.steps += 1

    def losses(self, real: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return L_gen and L_rt (Eq. 5 and 6) for a batch's embeddings, (B, D), and classes, (B,)."""
        weight = self.head.weight.detach()
        bias = None if self.head.bias is None else self.head.bias.detach()
        # The spread of the real embeddings: half their mean squared distance is the sum of their variances.
        width = float(real.var(dim=0).sum().sqrt()) if len(real) > 1 else 1.0
        width = max(width, 1e-6)
        generating = transforming = real.new_zeros(())
        for kind, (synthetic, reference, y) in self._synthesise(real, labels).items():
            logits = nn.functional.linear(synthetic, weight, bias)
            entropies = -(logits.softmax(dim=1) * logits.log_softmax(dim=1)).sum(dim=1)
            if kind == "embeddings":
                distance, entropy = F.gaussian_mmd(synthetic, reference, width), entropies.mean()
                generating = nn.functional.cross_entropy(logits, y) - self.method.alpha * distance
            else:  # one synthetic embedding per prototype: the sums of Eq. 6 run over the classes
                pairs = zip(synthetic.split(1), reference.split(1), strict=True)
                distance = torch.stack([F.gaussian_mmd(a, b, width) for a, b in pairs]).sum()
                entropy = entropies.sum()
            if getattr(self.method, kind):
                transforming = transforming - entropy + self.method.beta * distance
        return generating, transforming

    def _synthesise(self, real: Tensor, labels: Tensor) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
        """Return û and û_c (Eq. 3), each with its original embeddings and classes."""
        classes = self.seen.nonzero().flatten()
        weight = self.method.lambda_syn
        if self.method.smoothing:
            weight *= F.ramp_up(self.steps, self.method.ramp_steps)
        synthetic = {}
        for kind, base, y in (("embeddings", real, labels), ("prototypes", self.means[classes], classes)):
            residuals = self.generator(self._noise[kind], y)
            if self.transformation is not None:
                residuals = self.transformation(residuals)
            synthetic[kind] = (base + weight * residuals, base, y)
        return synthetic

    def _update_prototypes(self, real: Tensor, labels: Tensor) -> None:
        """Update the prototypes of the batch's classes (Eq. 4)."""
        rate = self.method.prototype_rate * F.ramp_up(self.steps, self.method.ramp_steps)
        for label in labels.unique():
            mean = real[labels == label].mean(dim=0)
            share = rate if bool(self.seen[label]) else 1.0
            self.means[label] = (1.0 - share) * self.means[label] + share * mean
            self.seen[label] = True

    def metrics(self) -> dict[str, float]:
        return self._means.read()

    def collect(self) -> Payload:
        return {key: value.detach() for key, value in self.generator.state_dict().items()}

    def apply(self, payload: Payload) -> None:
        self.generator.load_state_dict(payload)

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


class FixedShapeSite(FRAugSite):
    """The site's half on a GPU: every step takes the same few operations, without waiting for a number.

    Prototypes of all classes pass through both networks, in one batch with the embeddings; a class not yet
    seen has weight 0. A table has the values that depend on the number of steps.
    """

    def __init__(self, method: FRAug, network: nn.Module) -> None:
        super().__init__(method, network)
        ramps = [F.ramp_up(step, method.ramp_steps) for step in range(method.ramp_steps + 1)]
        rows = [[r if method.smoothing else 1.0, r] for r in ramps]
        self.steps = torch.zeros((), dtype=torch.long, device=self.means.device)
        self._by_step = self.means.new_tensor(rows) * self.means.new_tensor(
            [method.lambda_syn, method.prototype_rate]
        )
        self._classes = torch.arange(len(self.means), device=self.means.device)
        self._signs = self.means.new_tensor([[1.0, -1.0], [-1.0, 1.0]])
        self._synthetic: tuple[Tensor, Tensor] | None = None

    def loss(self, step: Step) -> Tensor | None:
        assert self._embeddings is not None
        if not self._optimisers:
            self._begin()
        real, self._embeddings = self._embeddings, None
        labels = torch.cat([step.targets, self._classes])
        one_hot = (labels[:, None] == self._classes).to(real)
        last = len(self._by_step) - 1
        scale, rate = self._by_step.index_select(0, self.steps.clamp(max=last).view(1))[0].unbind()
        if first := self._real is None:
            self._real = real
            self._move_prototypes(real, one_hot[: len(real)], rate)
        residuals = self.generator.layers(torch.cat([self._draw(len(labels), real), one_hot], dim=1))
        if self.transformation is not None:
            residuals = self.transformation(residuals)
        synthetic = torch.addcmul(torch.cat([real, self.means]), residuals, scale)
        each = real.new_full((len(real),), self.method.embeddings / len(real))
        weights = torch.cat([each, self.seen * float(self.method.prototypes)])
        if first:
            self._synthetic = synthetic, weights
        logits = nn.functional.linear(synthetic.detach(), self.head.weight, self.head.bias)
        return weights @ nn.functional.cross_entropy(logits, labels, reduction="none")

    def losses(self, real: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """See `FRAugSite.losses`; for the synthetic embeddings of the last `loss`."""
        assert self._synthetic is not None
        (synthetic, weights), self._synthetic, count = self._synthetic, None, len(real)
        bias = None if self.head.bias is None else self.head.bias.detach()
        logits = nn.functional.linear(synthetic, self.head.weight.detach(), bias)
        log = logits.log_softmax(dim=1)
        squared_width = real.var(dim=0).sum().clamp(min=1e-12) if count > 1 else real.new_ones(())
        pairs = torch.cat([synthetic[:count], real])
        kernel = (pairs[:, None] - pairs).square().sum(dim=2).div(-2.0 * squared_width).exp()
        distance = (kernel.view(2, count, 2, count).mean(dim=(1, 3)) * self._signs).sum()
        generating = nn.functional.nll_loss(log[:count], labels) - self.method.alpha * distance
        transforming = weights @ (log.exp() * log).sum(dim=1)
        if self.method.embeddings:
            transforming = transforming + self.method.beta * distance
        if self.method.prototypes:  # of a pair: k(a, a) + k(b, b) - 2 k(a, b)
            moved = (synthetic[count:] - self.means).square().sum(dim=1).div(-2.0 * squared_width)
            transforming = transforming - 2.0 * self.method.beta * (weights[count:] @ moved.expm1())
        return generating, transforming

    def _move_prototypes(self, real: Tensor, one_hot: Tensor, rate: Tensor) -> None:
        """Update all prototypes at once (Eq. 4), with share 0 for classes that the batch lacks."""
        counts = one_hot.sum(dim=0)
        present = counts > 0
        share = present * torch.where(self.seen, rate, 1.0)
        self.means.lerp_(one_hot.T @ real / counts.clamp(min=1.0)[:, None], share[:, None])
        self.seen.logical_or_(present)

    def restore(self, state: Payload) -> None:
        super().restore(state)
        self.steps = state["steps"].to(self.means.device, copy=True)
