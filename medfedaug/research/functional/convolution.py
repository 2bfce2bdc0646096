"""Images under random convolutions, and the divergence of their predictions (RandConv)."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from medfedaug.functional.passes import working_precision

_CONVOLUTIONS = {2: functional.conv2d, 3: functional.conv3d}


def mix_convolution(x: Tensor, weight: Tensor, share: Tensor | float = 0.0) -> Tensor:
    r"""Mix images with their convolution (RandConv, Eq. of RC_mix).

    ::

        x′ = α x + (1 − α) (W * x)

    with zeros around the image, so that it keeps its size.

    Args:
        x: images (B, C, \*spatial), of two or three dimensions.
        weight: W, (C, C, k, k) or (C, C, k, k, k), k odd.
        share: α.

    Returns:
        The images, of the shape of ``x``.

    Example:
        >>> mix_convolution(torch.ones(1, 1, 1, 2), torch.full((1, 1, 1, 1), 3.0), share=0.5)
        tensor([[[[2., 2.]]]])
    """
    work = working_precision(x)
    convolve = _CONVOLUTIONS[x.dim() - 2]
    convolved = convolve(work, weight.to(work), padding=weight.shape[-1] // 2)
    return (share * work + (1 - share) * convolved).to(x.dtype)


def prediction_spread(logits: Sequence[Tensor]) -> Tensor:
    r"""Jensen-Shannon divergence between predictions (RandConv, consistency loss).

    ::

        (1/J) Σⱼ KL(pⱼ ‖ p̄),   p̄ = (1/J) Σⱼ pⱼ

    with the softmax p of J logits; the mean over images and, of label maps, over voxels.

    Args:
        logits: (B, K) or (B, K, \*spatial) each.

    Example:
        >>> a, b = torch.tensor([[100.0, 0.0]]), torch.tensor([[0.0, 100.0]])
        >>> round(float(prediction_spread([a, b])), 4)  # log 2
        0.6931
    """
    logs = torch.stack([working_precision(logit).log_softmax(dim=1) for logit in logits])
    middle = logs.logsumexp(dim=0) - math.log(len(logits))
    return (logs.exp() * (logs - middle)).sum(dim=2).mean()
