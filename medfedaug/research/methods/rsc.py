"""RSC: muted features with the largest influence on the label, so that others are learned."""

import torch
from torch import Tensor
from torch.nn.functional import linear

from medfedaug import functional as F
from medfedaug.methods.arguments import BelowOne
from medfedaug.methods.base import Method, SiteContext, SitePart, Step
from medfedaug.methods.site_parts import FeatureSite, linear_head


class RSC(Method):
    """Representation self-challenging (Huang et al., ECCV 2020), for classification.

    For an image with label y, the share of its features z with the largest gradients of the label's logit,
    ``g_z = ∂h_y(z) / ∂z``, is set to zero, ::

        mᵢ = [g_(z,i) < qₚ(g_z)],   ℓ = CE(h(z ⊙ m), y)

    but only in the share of a batch whose probability of the label falls most; other images keep m = 1.
    Nothing is exchanged.

    Args:
        features: share of muted features; with 0 it is FedAvg.
        images: share of images of a batch with muted features.

    Deviations:
        z is the input of the last layer, and its gradient the label's row of the weights. The paper mutes the
        last feature maps, by position or by channel at random. The shares are from its public code.
    """

    name = "rsc"
    tasks = ("classification",)
    requires = frozenset({"labels"})

    def __init__(self, features: BelowOne = 1 / 3, images: BelowOne = 1 / 3) -> None:
        self.features, self.images = features, images

    def at_site(self, context: SiteContext) -> SitePart:
        return RSCSite(self, context) if self.features and self.images else SitePart()


class RSCSite(FeatureSite):
    def __init__(self, method: RSC, context: SiteContext) -> None:
        self.method, self.head = method, linear_head(context.network, method.name)
        super().__init__(context.network)

    def loss(self, step: Step) -> Tensor:
        """Return the term that replaces the task's loss by the loss of the muted features."""
        features = self.step_features()
        labels = step.targets.long()
        mask = self.mask(features.detach(), labels)
        return step.criterion(self._logits(features * mask), step.targets) - step.task_loss

    @torch.no_grad()
    def mask(self, features: Tensor, labels: Tensor) -> Tensor:
        """Return m of each image, (B, D)."""
        gradients = F.working_precision(self.head.weight)[labels]
        muted = gradients < gradients.quantile(1 - self.method.features, dim=1, keepdim=True)
        whole, challenged = (
            self._logits(z).softmax(dim=1).gather(1, labels[:, None]) for z in (features, features * muted)
        )
        falls = whole - challenged
        return (muted | (falls < falls.quantile(1 - self.method.images))).to(features)

    def _logits(self, features: Tensor) -> Tensor:
        weight, bias = self.head.weight, self.head.bias
        return linear(features, weight.to(features), None if bias is None else bias.to(features))
