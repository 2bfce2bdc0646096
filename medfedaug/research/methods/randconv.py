"""RandConv: consistent predictions of training images under random convolutions."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from medfedaug.errors import ConfigError
from medfedaug.functional.features import working_precision
from medfedaug.methods.arguments import NotNegative
from medfedaug.methods.base import Method, SiteContext, SitePart, Step, Targets
from medfedaug.methods.site_parts import MeasuredSite


class RandConv(Method):
    """Random convolutions as augmentation (Xu et al., ICLR 2021).

    Every batch passes a convolution with random weights, which changes textures and keeps shapes: W of kernel
    size k, drawn from a list, with independent entries ``N(0, 1/(C k²))`` for C channels (``C k³``
    in 3D), without bias. The images become (RC_mix) ::

        x′ = α x + (1 − α)(W * x),   α ~ U(0, 1).

    The loss of x' gains ::

        (λ/3) Σ_(j=1..3) KL(pⱼ ‖ p̄)

    of the predictions of x' and of two more versions of the same images, each with its own draws, and the
    mean of the three. Inference is the plain network's.

    Only the model leaves a site. A step costs three times as much, unless λ = 0.

    Args:
        kernels: the kernel sizes, odd.
        consistency: λ; 0 for only the augmentation. The paper's for digits is 10.

    Deviations:
        The paper also has RC_img, without mixing. This follows the paper's public code, but makes the two
        other versions from x, as in the paper's algorithm, and not from x'. For label maps the divergence is
        averaged over the voxels. All three passes update running statistics, as in the code. Name a method
        that mixes images before this one, or it changes only x'. Images are the network's input, normalised
        or not, and are not clipped.
    """

    name = "randconv"
    provides = frozenset({"extra_passes"})

    def __init__(self, kernels: Sequence[int] = (1, 3, 5, 7), consistency: NotNegative = 10.0) -> None:
        if not kernels or any(k < 1 or k % 2 == 0 for k in kernels):
            raise ConfigError(f"randconv: kernels are odd numbers from 1, got {list(kernels)}")
        self.kernels, self.consistency = tuple(kernels), consistency

    def at_site(self, context: SiteContext) -> SitePart:
        return RandConvSite(self)


class RandConvSite(MeasuredSite):
    """The site's half, which compares the predictions of a batch's versions."""

    measured = ("spread",)

    def __init__(self, method: RandConv) -> None:
        self.method = method
        self._inputs: Tensor | None = None

    def mix(self, inputs: Tensor, targets: Targets) -> tuple[Tensor, Targets]:
        self._inputs = inputs
        return self._version(inputs), targets

    def _version(self, x: Tensor) -> Tensor:
        kernels, channels, dims = self.method.kernels, x.shape[1], x.dim() - 2
        share = float(torch.rand(()))
        size = kernels[int(torch.randint(len(kernels), ()))]
        weight = torch.randn(channels, channels, *(size,) * dims)
        return mix_convolution(x, weight.to(x.device) / math.sqrt(channels * size**dims), share)

    def loss(self, step: Step) -> Tensor | None:
        """Return λ times the spread of the three predictions."""
        if not self.method.consistency:
            return None
        assert self._inputs is not None
        others = [step.network(self._version(self._inputs)) for _ in range(2)]
        spread = prediction_spread([step.outputs, *others])
        self.measure(spread)
        return self.method.consistency * spread

    def end_round(self) -> None:
        self._inputs = None


_CONVOLUTIONS = {2: functional.conv2d, 3: functional.conv3d}


def mix_convolution(x: Tensor, weight: Tensor, share: Tensor | float = 0.0) -> Tensor:
    r"""Mix images with their convolution (RandConv, Eq. of RC_mix).

    ::

        x′ = α x + (1 − α) (W * x)

    with zeros around the image, so that it keeps its size.

    Images are (B, C, \*spatial), of two or three dimensions; W is (C, C, k, k) or (C, C, k, k, k), k odd.

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

    Example:
        >>> a, b = torch.tensor([[100.0, 0.0]]), torch.tensor([[0.0, 100.0]])
        >>> round(float(prediction_spread([a, b])), 4)  # log 2
        0.6931
    """
    logs = torch.stack([working_precision(logit).log_softmax(dim=1) for logit in logits])
    middle = logs.logsumexp(dim=0) - math.log(len(logits))
    return (logs.exp() * (logs - middle)).sum(dim=2).mean()
