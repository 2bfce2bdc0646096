"""FedProto: alignment of the sites' mean features of each class."""

from typing import Any

import torch
from torch import Tensor

from medfedaug.methods.arguments import NotNegative
from medfedaug.methods.base import Method, ServerExchange, SitePart
from medfedaug.methods.contexts import Payload, ServerContext, SiteContext, Step, zeros
from medfedaug.methods.site_parts import PrototypeSite, linear_head


class FedProto(Method):
    """Prototypes of the classes (Tan et al., AAAI 2022, Eq. 3, 6 and 7).

    A site's prototype of a class is the mean of its images' features, the input of the network's last layer.
    The server averages the prototypes of a class, weighted by the number of its images. In the next round
    the loss gains λ Σ_j ‖C_j − C̄_j‖ over the classes j of the batch, with the batch's means C_j.

    Exchange, every round: ``sums`` (K, D) and ``counts`` (K,) up; ``means`` (K, D) and ``counts`` down.
    Classes that no site has contribute nothing.

    Args:
        weight: λ.

    Deviations:
        The paper's sites share prototypes and no weights, which is ``single,fedproto``; alone, the method
        averages models too, as in other papers' comparisons. Eq. 6 divides the weighted mean of the sites'
        prototypes again by the number of sites with the class, which would draw every prototype towards zero:
        here it is the mean. The paper's models predict the class of the nearest prototype; here the network's
        last layer classifies. Eq. 3 does not name the statistics of batch norm: the features are those of
        the last local epoch, as in the paper's public code, since the next round compares features of
        training with them. In evaluation mode the losses of small runs with batch norm grew without bound.
        The public code has the squared distance, and an image's features instead of the batch's mean.
    """

    name = "fedproto"
    tasks = ("classification",)
    requires = frozenset({"labels"})

    def __init__(self, weight: NotNegative = 1.0) -> None:
        self.weight = weight

    def at_site(self, context: SiteContext) -> SitePart:
        return FedProtoSite(self, context)

    def every_round(self, context: ServerContext) -> ServerExchange:
        assert context.task is not None
        width = linear_head(context.network, self.name).in_features
        return FedProtoServer(context.task.num_classes, width)


class FedProtoSite(PrototypeSite):
    def __init__(self, method: FedProto, context: SiteContext) -> None:
        super().__init__(context)
        self.method = method
        self.means: Tensor | None = None
        self.known: Tensor | None = None

    def loss(self, step: Step) -> Tensor | None:
        """Return λ times the distance of the batch's prototypes from the federation's."""
        features = self.step_features()
        if self.means is None or self.known is None:
            return None
        classes = self.task.probabilities(step.targets).to(features)
        sums, counts = classes.T @ features, classes.sum(dim=0)
        shared = (counts > 0) & self.known
        prototypes = sums[shared] / counts[shared, None]
        distances = torch.linalg.vector_norm(prototypes - self.means[shared], dim=1)
        loss: Tensor = self.method.weight * distances.sum()
        return loss

    def collect(self) -> Payload:
        """Return the features of all training images, summed by class, and the numbers of images."""
        sums, counts = self.of_all_images()
        return {"sums": sums, "counts": counts}

    def apply(self, payload: Payload) -> None:
        device = self.context.device
        self.means, self.known = payload["means"].to(device), payload["counts"].to(device) > 0


class FedProtoServer(ServerExchange):
    """The server's half: running sums."""

    def __init__(self, classes: int, width: int) -> None:
        self._sizes = {"sums": (classes, width), "counts": (classes,)}
        self.shapes = self._sizes
        self.total = zeros(self._sizes)
        self.seen = 0

    def check(self, payload: Payload) -> None:
        counts = payload["counts"]
        if bool((counts < 0).any()) or bool((payload["sums"][counts == 0] != 0).any()):
            raise ValueError("counts that are negative, or features of a class without images")

    def accept(self, site: str, payload: Payload, weight: float = 1.0) -> None:
        """Add the sums of one site, whose weight is its number of images in each class."""
        for key, total in self.total.items():
            total += payload[key].double()

    def result(self) -> Payload:
        """Return the mean features of each class; zeros for a class without images."""
        sums, counts = self.total["sums"], self.total["counts"]
        self.seen = int((counts > 0).sum())
        self.total = zeros(self._sizes)
        return {"means": (sums / counts.clamp_min(1)[:, None]).float(), "counts": counts.float()}

    def summary(self) -> dict[str, Any]:
        return {"classes": self.seen}
