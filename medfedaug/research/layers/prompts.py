"""Prompts of a vision transformer: tokens that learn what is specific to a site."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from monai.networks.nets import ViT
from torch import Tensor, nn

from medfedaug.functional import mix_statistics
from medfedaug.models.adaptation import UnsavedModule

_CHILD = "prompts"


class Prompts(UnsavedModule):
    """Tokens appended to an image's tokens: the site's in training, the federation's in evaluation.

    Args:
        count: number of tokens P.
        size: width D of a token.

    Attributes:
        tokens: the site's prompts, (P, D), trained with the network.
        global_tokens: the federation's, (P, D); while ``None``, evaluation uses the site's.
        mix: the range of u inside `mixing_prompts`, otherwise ``None``.
    """

    global_tokens: Tensor | None

    def __init__(self, count: int, size: int) -> None:
        super().__init__()
        self.tokens = nn.Parameter(0.02 * torch.randn(count, size))
        self.register_buffer("global_tokens", None, persistent=False)
        self.mix: tuple[float, float] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, D) to (B, N + P, D)."""
        tokens: Tensor = self.tokens
        if self.global_tokens is not None:
            if self.mix is not None:
                # One u per element, (P, D), as for the statistics of channels.
                u = torch.empty_like(tokens).uniform_(*self.mix)
                tokens = mix_statistics(tokens, self.global_tokens, u)
            elif not self.training:
                tokens = self.global_tokens
        return torch.cat([x, tokens.expand(len(x), -1, -1)], dim=1)


def _append(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    tokens: Tensor = module.get_submodule(_CHILD)(output)
    return tokens


def insert_prompts(net: nn.Module, count: int = 4) -> nn.Module:
    """Append prompts to the tokens of a vision transformer for classification.

    Args:
        net: MONAI's `ViT` with ``classification=True``, changed in place. Its state dict stays as it is.
        count: number of prompts, at least 1.
    """
    if not isinstance(net, ViT) or not net.classification:
        raise ValueError(f"prompts go into MONAI's ViT with classification=True, not {type(net).__name__}")
    if count < 1:
        raise ValueError(f"count is {count}, expected at least 1")
    if hasattr(net.patch_embedding, _CHILD):
        raise ValueError("the network already has prompts")
    prompts = Prompts(count, net.norm.normalized_shape[0]).to(net.cls_token)
    net.patch_embedding.add_module(_CHILD, prompts)
    net.patch_embedding.register_forward_hook(_append)
    return net


def find_prompts(net: nn.Module) -> Prompts:
    """Return the prompts of a network that has them."""
    return next(module for module in net.modules() if isinstance(module, Prompts))


@contextmanager
def mixing_prompts(net: nn.Module, low: float, high: float) -> Iterator[None]:
    """A context in which prompts are u·own + (1 − u)·federation's; u ~ U(low, high) is drawn in each pass."""
    prompts = find_prompts(net)
    before, prompts.mix = prompts.mix, (low, high)
    try:
        yield
    finally:
        prompts.mix = before
