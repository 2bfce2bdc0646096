"""PartialFed-Adaptive: each site learns which layers of the global model to load."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributions.relaxed_bernoulli import LogitRelaxedBernoulli

from medfedaug.errors import MedFedAugError
from medfedaug.methods.arguments import Count, Positive
from medfedaug.methods.base import Method, Payload, SiteContext, SitePart
from medfedaug.models.substitution import call_with

_LOGITS, _OWN = "logits", "own/"


class PartialFedAdaptive(Method):
    """PartialFed-Adaptive: partial initialisation, learned by each site (Sun et al., NeurIPS 2021).

    Sites send all layers and the server averages all. For layer l a site loads the global weights
    Wᵍₗ, or keeps its own from the end of its last round, Wˢₗ. It learns this choice at
    the start of a round: with logits θₗ and draws of the binary Gumbel-softmax (Jang et al. and
    Maddison et al., ICLR 2017), ::

        uₗ = sigmoid((θₗ + log rₗ − log(1 − rₗ)) / τ),   rₗ ~ U(0, 1),
        Wₗ = uₗ Wᵍₗ + (1 − uₗ) Wˢₗ,

    the logits descend along the gradient of the task's loss at W with all weights fixed. The site then loads
    layers with ``θₗ ≥ 0``, and trains the round as any other. In its first round it loads
    everything. It is scored with its choice of layers from the scored model; a site that did not train, with
    the global model.

    Args:
        epochs: passes over the site's training images to learn the logits of a round; each costs about as
            much as an epoch of training.
        learning_rate: of the logits (Adam, made anew in every round).
        temperature: τ; the smaller, the closer u is to 0 or 1.

    Raises:
        ConfigError: for arguments out of range.

    Deviations:
        The paper was not available; this follows its abstract and descriptions by others: a strategy for each
        site, learned layer by layer through Gumbel-softmax, and FedAvg at the server. A layer is a module
        with weights; its running statistics follow the weights, without a gradient of their own (PyTorch's
        batch norm has none for them). While the logits are learned, images are not augmented and the network
        is in evaluation mode, as in scoring: no other method's layers act. The site's own weights were
        trained on the same images, which favours them.
    """

    name = "partialfed_adaptive"
    requires = frozenset({"separate_sites"})
    provides = frozenset({"method:partialfed", "personal_model"})
    excludes = frozenset({"global_start"})

    def __init__(
        self, epochs: Count = 1, learning_rate: Positive = 0.05, temperature: Positive = 1.0
    ) -> None:
        self.epochs, self.learning_rate, self.temperature = epochs, learning_rate, temperature

    def at_site(self, context: SiteContext) -> SitePart:
        return PartialFedAdaptiveSite(self, context)


class PartialFedAdaptiveSite(SitePart):
    """The site's own and the global weights, and a logit for each layer.

    Attributes:
        layers: the entries of each module, which are loaded together.
        logits: θ, in the order of ``layers``.
    """

    def __init__(self, method: PartialFedAdaptive, context: SiteContext) -> None:
        self.method, self.context = method, context
        self.layers: dict[str, list[str]] = {}
        for key, value in context.network.state_dict().items():
            if value.is_floating_point() and key not in context.local_entries:
                self.layers.setdefault(key.rpartition(".")[0], []).append(key)
        self.logits = torch.zeros(len(self.layers))
        self._own: Payload = {}
        self._global: Payload = {}

    def loaded(self) -> list[str]:
        """Return the modules that the logits choose to load."""
        return [name for name, logit in zip(self.layers, self.logits.tolist(), strict=True) if logit >= 0]

    def personalise(self) -> None:
        """Restore the site's own weights in layers that it does not load."""
        if not self._own:
            return
        state = self.context.network.state_dict()
        self._global = {key: state[key].clone() for key in self._own}
        self._put_own()

    def start_round(self) -> None:
        """Learn which layers to load, and load them."""
        if not self._own or not self.method.epochs:
            return
        network, method, task = self.context.network, self.method, self.context.task
        assert task is not None
        network.eval()
        logits = self.logits.clone().requires_grad_()
        optimiser = torch.optim.Adam([logits], lr=method.learning_rate)
        temperature = torch.tensor(method.temperature)
        for _ in range(method.epochs):
            for inputs, targets in self.context.training_batches():
                # On the CPU, for the same draws in a run on a GPU.
                draw = LogitRelaxedBernoulli(temperature, logits=logits, validate_args=False).rsample()
                outputs = call_with(network, self._mixed(draw.sigmoid().to(inputs.device)), inputs)
                (logits.grad,) = torch.autograd.grad(task.loss(outputs, targets), [logits])
                optimiser.step()
        if not bool(torch.isfinite(logits).all()):
            raise MedFedAugError(
                f"site {self.context.name}: partialfed_adaptive: the loss between the global weights and the "
                "site's own is not finite; lower the learning rate"
            )
        self.logits = logits.detach()
        network.load_state_dict(self._global, strict=False)
        self._put_own()

    def end_round(self) -> None:
        state = self.context.network.state_dict()
        self._own = {key: state[key].clone() for keys in self.layers.values() for key in keys}

    def metrics(self) -> dict[str, float]:
        return {"loaded": len(self.loaded()) / max(len(self.layers), 1)}

    def state(self) -> Payload:
        return {_LOGITS: self.logits, **{_OWN + key: value for key, value in self._own.items()}}

    def restore(self, state: Payload) -> None:
        device = next(iter(self.context.network.state_dict().values())).device
        self.logits = state[_LOGITS].cpu()
        own = (key for key in state if key != _LOGITS)
        self._own = {key.removeprefix(_OWN): state[key].to(device) for key in own}

    def _put_own(self) -> None:
        kept = self.layers.keys() - set(self.loaded())
        own = {key: self._own[key] for name in kept for key in self.layers[name]}
        self.context.network.load_state_dict(own, strict=False)

    def _mixed(self, share: Tensor) -> Payload:
        parameters = dict(self.context.network.named_parameters())
        return {
            key: torch.lerp(self._own[key], self._global[key], u if key in parameters else u.detach())
            for u, keys in zip(share, self.layers.values(), strict=True)
            for key in keys
        }
