"""FedFD for transformers: mixed prompts of site and federation instead of statistics."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from monai.networks.nets import ViT
from torch import Tensor, nn

from medfedaug.functional import mix_statistics
from medfedaug.methods.arguments import AtLeastOne, NotNegative, Share
from medfedaug.methods.base import Method, ServerExchange, SiteExchange, SitePart
from medfedaug.methods.contexts import Payload, ServerContext, SiteContext
from medfedaug.methods.exchanges import AverageServer
from medfedaug.methods.site_parts import DiversifiedSite
from medfedaug.models.adaptation import UnsavedModule


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
        count: P, the number of prompts.

    Deviations:
        The paper uses the prompts of DoPrompt, one set per domain, without its adapter, and gives neither
        their number nor the draw of u: here one u per element. Features are the class token before the head.
    """

    name = "fedfd_prompt"
    requires = frozenset({"labels"})
    provides = frozenset({"extra_passes"})
    excludes = frozenset({"complete_state_dict"})

    def __init__(self, lambda1: Share = 0.1, lambda2: NotNegative = 4.0, count: AtLeastOne = 4) -> None:
        self.lambda1, self.lambda2, self.count = lambda1, lambda2, count

    def prepare_network(self, network: nn.Module) -> nn.Module:
        return insert_prompts(network, self.count)

    def at_site(self, context: SiteContext) -> SitePart:
        return FedFDPromptSite(self, context.network)

    def every_round(self, context: ServerContext) -> ServerExchange:
        return AverageServer({"tokens": find_prompts(context.network).tokens})


class FedFDPromptSite(DiversifiedSite, SiteExchange):
    def __init__(self, method: FedFDPrompt, network: nn.Module) -> None:
        super().__init__(network, method.lambda1, method.lambda2)
        self.prompts = find_prompts(network)
        self.every_round = self

    def diversified(self) -> AbstractContextManager[Any]:
        return mixing_prompts(self.network)

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


_CHILD = "prompts"


class Prompts(UnsavedModule):
    """Tokens appended to an image's tokens: the site's in training, the federation's in evaluation.

    Attributes:
        tokens: the site's prompts, (P, D), trained with the network.
        global_tokens: the federation's, (P, D); while ``None``, evaluation uses the site's.
        mix: whether the pass is inside `mixing_prompts`.
    """

    global_tokens: Tensor | None

    def __init__(self, count: int, size: int) -> None:
        super().__init__()
        self.tokens = nn.Parameter(0.02 * torch.randn(count, size))
        self.register_buffer("global_tokens", None, persistent=False)
        self.mix = False

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, D) to (B, N + P, D)."""
        tokens: Tensor = self.tokens
        if self.global_tokens is not None:
            if self.mix:
                # One u per element, (P, D), as for the statistics of channels.
                u = torch.rand_like(tokens)
                tokens = mix_statistics(tokens, self.global_tokens, u)
            elif not self.training:
                tokens = self.global_tokens
        return torch.cat([x, tokens.expand(len(x), -1, -1)], dim=1)


def _append(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    tokens: Tensor = module.get_submodule(_CHILD)(output)
    return tokens


def insert_prompts(net: nn.Module, count: int = 4) -> nn.Module:
    """Append prompts to the tokens of a vision transformer for classification.

    The network is MONAI's `ViT` with ``classification=True``, changed in place. Its state dict stays as
    it is.
    """
    if not isinstance(net, ViT) or not net.classification:
        raise ValueError(f"prompts go into MONAI's ViT with classification=True, not {type(net).__name__}")
    prompts = Prompts(count, net.norm.normalized_shape[0]).to(net.cls_token)
    net.patch_embedding.add_module(_CHILD, prompts)
    net.patch_embedding.register_forward_hook(_append)
    return net


def find_prompts(net: nn.Module) -> Prompts:
    """Return the prompts of a network that has them."""
    return next(module for module in net.modules() if isinstance(module, Prompts))


@contextmanager
def mixing_prompts(net: nn.Module) -> Iterator[None]:
    """A context in which prompts are u·own + (1 − u)·federation's; u ~ U(0, 1) is drawn in each pass."""
    prompts = find_prompts(net)
    prompts.mix = True
    try:
        yield
    finally:
        prompts.mix = False
