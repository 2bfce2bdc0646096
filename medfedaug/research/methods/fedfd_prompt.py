"""FedFD for transformers: mixed prompts of site and federation instead of statistics."""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from medfedaug.methods.arguments import NotNegative, Share
from medfedaug.methods.average import AverageServer
from medfedaug.methods.base import Method, ServerExchange, SiteExchange, SitePart
from medfedaug.methods.contexts import Payload, ServerContext, SiteContext
from medfedaug.methods.diversification import DiversifiedSite, Mixing, Reduction, Weights, mixing_range
from medfedaug.research.layers.prompts import find_prompts, insert_prompts, mixing_prompts


class FedFDPrompt(Method):
    """Feature diversification of a vision transformer by its prompts (Yang et al., section 5).

    Prompts are tokens next to the image's. Each site trains and keeps its own; the server returns
    their average. A batch passes with the site's prompts, and again with p_Δ = u·p_k + (1 − u)·p_G, as FedFD
    mixes statistics (Eq. 2); the loss is Eq. 5. In evaluation every site uses the federation's
    prompts.

    Exchange, every round: the prompts (P, D) up, their average down, with the weights of the models.

    Args:
        lambda1: see `FedFD`.
        lambda2: see `FedFD`.
        mixing: see `FedFD`.
        low: see `FedFD`.
        high: see `FedFD`.
        distance: see `FedFD`.
        count: P, the number of prompts.

    Raises:
        ConfigError: for arguments out of range.
        ValueError: for a network that is no vision transformer for classification.

    Deviations:
        The paper uses the prompts of DoPrompt, one set per domain, without its adapter, and gives neither
        their number nor the draw of u: here one u per element. Features are the class token before the head.
    """

    name = "fedfd_prompt"
    requires = frozenset({"labels"})
    provides = frozenset({"extra_passes"})
    excludes = frozenset({"complete_state_dict"})

    def __init__(
        self,
        lambda1: Share = 0.1,
        lambda2: NotNegative = 4.0,
        mixing: Mixing = "random",
        low: float = 0.0,
        high: float = 1.0,
        distance: Reduction = "mean",
        count: int = 4,
    ) -> None:
        self.weights = Weights(lambda1, lambda2, distance)
        self.range = mixing_range(self.name, mixing, low, high)
        self.count = count

    def prepare_network(self, network: nn.Module) -> nn.Module:
        return insert_prompts(network, self.count)

    def at_site(self, context: SiteContext) -> SitePart:
        return FedFDPromptSite(self, context.network)

    def every_round(self, context: ServerContext) -> ServerExchange:
        return AverageServer({"tokens": find_prompts(context.network).tokens})


class FedFDPromptSite(DiversifiedSite, SiteExchange):
    def __init__(self, method: FedFDPrompt, network: nn.Module) -> None:
        super().__init__(network, method.weights)
        self.range, self.prompts = method.range, find_prompts(network)
        self.every_round = self

    def diversified(self) -> AbstractContextManager[Any]:
        return mixing_prompts(self.network, *self.range)

    def collect(self) -> Payload:
        return {"tokens": self.prompts.tokens.detach()}

    def apply(self, payload: Payload) -> None:
        self.prompts.global_tokens = payload["tokens"].to(self.prompts.tokens)
        self.ready = True

    def state(self) -> Payload:
        """Return the site's prompts, which are not in the network's state dict."""
        return self.collect()

    @torch.no_grad()
    def restore(self, state: Payload) -> None:
        self.prompts.tokens.copy_(state["tokens"])
