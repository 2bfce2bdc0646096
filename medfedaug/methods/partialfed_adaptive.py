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
    r"""PartialFed-Adaptive: partial initialisation, learned by each site (Sun et al., NeurIPS 2021).

    Sites send all layers and the server averages all. Of layer l a site loads the global weights
    :math:`W^g_l`, or goes on with those that it had itself at the end of its last round, :math:`W^s_l`.
    Which, it learns at the start of a round: with logits :math:`\theta_l` and draws of the binary
    Gumbel-softmax (Jang et al. and Maddison et al., ICLR 2017),

    .. math:: u_l = \operatorname{sigmoid}\bigl((\theta_l + \log r_l - \log(1 - r_l)) / \tau\bigr),
              \quad r_l \sim U(0, 1),
              \qquad W_l = u_l W^g_l + (1 - u_l) W^s_l,

    the logits descend along the gradient of the task's loss at W while all weights stand still. A layer with
    :math:`\theta_l \ge 0` is then loaded, and the round trains as any other. In its first round a site loads
    everything. A site is scored with the layers that it would load of the model that is scored; one that did
    not train, with the global model.

    Args:
        epochs: passes over the site's training images with which the logits are learned in a round; each
            costs about as much as an epoch of training.
        learning_rate: of the logits (Adam, begun afresh in every round).
        temperature: τ; the smaller, the nearer u is to 0 or 1.

    Raises:
        ConfigError: for arguments out of range.

    Deviations:
        The paper could not be opened; this follows its abstract and what others write of it: a strategy for
        each site, learned layer by layer through Gumbel-softmax, and FedAvg at the server. A layer is a
        module with weights of its own; its running statistics go with them, without a gradient of their own
        (PyTorch's batch norm has none for them). Images are not augmented while the logits are learned, and
        the network is in evaluation mode, as it is when the result is scored: no other method's layers take
        part. The images are those on which the site's own weights were trained, which speaks for these.
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
    """The site's own weights beside the global ones, and a logit for each layer.

    Attributes:
        layers: by module, the entries that are loaded or not, together.
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
        """The modules that are loaded according to the logits."""
        return [name for name, logit in zip(self.layers, self.logits.tolist(), strict=True) if logit >= 0]

    def personalise(self) -> None:
        """Replace the weights that the site does not load by its own."""
        if not self._own:
            return
        state = self.context.network.state_dict()
        self._global = {key: state[key].clone() for key in self._own}
        self._put_own()

    def start_round(self) -> None:
        """Learn which layers to load, and load them."""
        if not self._own or not self.method.epochs:
            return
        network, method = self.context.network, self.method
        network.eval()
        logits = self.logits.clone().requires_grad_()
        optimiser = torch.optim.Adam([logits], lr=method.learning_rate)
        temperature = torch.tensor(method.temperature)
        for _ in range(method.epochs):
            for inputs, targets in self.context.training_batches():
                # On the CPU, so that a run on a GPU draws the same.
                draw = LogitRelaxedBernoulli(temperature, logits=logits, validate_args=False).rsample()
                outputs = call_with(network, self._mixed(draw.sigmoid().to(inputs.device)), inputs)
                (logits.grad,) = torch.autograd.grad(_loss(self.context, outputs, targets), [logits])
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
        """Keep the trained weights as the site's own."""
        state = self.context.network.state_dict()
        self._own = {key: state[key].clone() for keys in self.layers.values() for key in keys}

    def metrics(self) -> dict[str, float]:
        """The share of layers that were loaded."""
        return {"loaded": len(self.loaded()) / max(len(self.layers), 1)}

    def state(self) -> Payload:
        """The logits and the site's own weights."""
        return {_LOGITS: self.logits, **{_OWN + key: value for key, value in self._own.items()}}

    def restore(self, state: Payload) -> None:
        device = next(iter(self.context.network.state_dict().values())).device
        self.logits = state[_LOGITS].cpu()
        self._own = {
            key.removeprefix(_OWN): value.to(device) for key, value in state.items() if key != _LOGITS
        }

    def _put_own(self) -> None:
        loaded = set(self.loaded())
        own = {
            key: self._own[key] for name, keys in self.layers.items() if name not in loaded for key in keys
        }
        self.context.network.load_state_dict(own, strict=False)

    def _mixed(self, share: Tensor) -> Payload:
        parameters = dict(self.context.network.named_parameters())
        return {
            key: torch.lerp(self._own[key], self._global[key], u if key in parameters else u.detach())
            for u, keys in zip(share, self.layers.values(), strict=True)
            for key in keys
        }


def _loss(context: SiteContext, outputs: Tensor, targets: Tensor) -> Tensor:
    assert context.task is not None
    return context.task.loss(outputs, targets)
