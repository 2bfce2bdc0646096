"""FPL: contrast of features with clusters of the sites' prototypes."""

import math
from typing import Any

import torch
from torch import Tensor

from medfedaug.config.kinds import FEATURE_MEAN
from medfedaug.functional.features import working_precision
from medfedaug.methods.arguments import NotNegative, Positive
from medfedaug.methods.base import Method, ServerExchange, SitePart
from medfedaug.methods.contexts import Payload, ServerContext, SiteContext, Step
from medfedaug.methods.site_parts import PrototypeSite, linear_head


class FPL(Method):
    """Federated prototypes learning (Huang et al., CVPR 2023), for classification.

    A site's prototype of a class is the mean of its images' features (Eq. 2), the input of the network's
    last layer. The server clusters the sites' prototypes of a class by their first neighbours
    (`first_neighbours`, Eq. 4); the means of the clusters are the cluster prototypes Pᵏ (Eq. 5),
    their mean the unbiased prototype Uᵏ (Eq. 6), with equal weights for domains of many and of few
    sites. In the next round the loss of an image of class k with features z gains (Eq. 7, 8, 10, 12) ::

        L_CPCL = −log((Σ_(c∈Pᵏ) e^(s(z,c))) / (Σ_(c∈P) e^(s(z,c)))),
        L_UPCR = Σᵥ (zᵥ − Uᵏᵥ)²

    with the cosine over the temperature as s (`prototype_contrast`), as means over the batch.

    Exchange, every round: ``means`` (K, D) and ``known`` (K,), 1 for the site's classes, up; ``clusters``
    (J, D) and their ``classes`` (J,) down. An image whose class no site had contributes nothing.

    Args:
        temperature: τ.
        contrastive: weight of L_CPCL, 1 in the paper.
        consistency: weight of L_UPCR, 1 in the paper.

    Deviations:
        Eq. 2 does not name the statistics of batch norm: the features are those of the last local epoch, as
        in the public code, since the next round compares features of training with them. In evaluation mode
        AlexNet and ResNet-18 diverged within four rounds of four steps. The public code has the mean over the
        features in Eq. 10, which makes the terms equally large: ``consistency=1/D``; with D = 1024 the sum
        outweighs the others. It also uses the last partition of FINCH, which clusters the clusters. Absent
        sites have no prototypes in a round. FedFA+ reports this method for segmentation too, without a
        description.
    """

    name = "fpl"
    tasks = ("classification",)
    requires = frozenset({"labels"})

    def __init__(
        self, temperature: Positive = 0.02, contrastive: NotNegative = 1.0, consistency: NotNegative = 1.0
    ) -> None:
        self.temperature, self.contrastive, self.consistency = temperature, contrastive, consistency

    def at_site(self, context: SiteContext) -> SitePart:
        return FPLSite(self, context)

    def every_round(self, context: ServerContext) -> ServerExchange:
        assert context.task is not None
        width = linear_head(context.network, self.name).in_features
        return FPLServer(context.task.num_classes, width)


class FPLSite(PrototypeSite):
    def __init__(self, method: FPL, context: SiteContext) -> None:
        assert context.task is not None
        super().__init__(context)
        self.method, self.num_classes = method, context.task.num_classes
        self.clusters: Tensor | None = None
        self.classes: Tensor | None = None

    def loss(self, step: Step) -> Tensor | None:
        """Return L_CPCL and L_UPCR; nothing before the first prototypes."""
        features = self.step_features()
        if self.clusters is None or self.classes is None:
            return None
        known = torch.isin(step.targets, self.classes)
        z, labels = features[known], step.targets[known]
        contrast = prototype_contrast(z, labels, self.clusters, self.classes, self.method.temperature)
        distance = (z - self.unbiased[labels]).square().sum(dim=1)
        terms = self.method.contrastive * contrast + self.method.consistency * distance
        return terms.sum() / len(features)

    def collect(self) -> Payload:
        """Return the mean features of each class over all training images; zeros for missing classes."""
        sums, counts = self.of_all_images()
        census, means = self.context.census, sums / counts.clamp_min(1)[:, None]
        return {"means": census.like(means, sums), "known": census.like((counts > 0).float(), counts)}

    def apply(self, payload: Payload) -> None:
        """Take the cluster prototypes, and compute the unbiased ones (Eq. 6)."""
        device = self.context.device
        self.clusters, self.classes = payload["clusters"].to(device), payload["classes"].to(device).long()
        members = (torch.arange(self.num_classes, device=device)[:, None] == self.classes).to(self.clusters)
        self.unbiased = (members @ self.clusters) / members.sum(dim=1).clamp_min(1)[:, None]


class FPLServer(ServerExchange):
    """The server's half, which keeps the prototypes of a round to cluster them."""

    def __init__(self, classes: int, width: int) -> None:
        self.shapes = {"means": (classes, width), "known": (classes,)}
        self.kinds = {"means": FEATURE_MEAN}
        self.sites: dict[str, Payload] = {}
        self.counts: dict[str, int] = {}

    def check(self, payload: Payload) -> None:
        known = payload["known"]
        if bool(((known != 0) & (known != 1)).any()) or bool((payload["means"][known == 0] != 0).any()):
            raise ValueError("known is other than 0 or 1, or a class without images has features")

    def accept(self, site: str, payload: Payload, weight: float = 1.0) -> None:
        self.sites[site] = payload

    def result(self) -> Payload:
        """Return the means of the clusters, class by class."""
        # In a fixed order, since the first of equal neighbours counts.
        sites = [self.sites[name] for name in sorted(self.sites)]
        means = torch.stack([site["means"] for site in sites]).double()
        known = torch.stack([site["known"] for site in sites]) > 0
        clusters, classes = [], []
        for label in range(known.shape[1]):
            prototypes = means[known[:, label], label]
            if not len(prototypes):
                continue
            groups = first_neighbours(prototypes)
            for group in range(int(groups.max()) + 1):
                clusters.append(prototypes[groups == group].mean(dim=0))
                classes.append(label)
        self.counts = {"classes": len(set(classes)), "clusters": len(clusters)}
        self.sites = {}
        if not clusters:  # each site has too few patients of every class
            return {}
        return {"clusters": torch.stack(clusters).float(), "classes": torch.tensor(classes).float()}

    def summary(self) -> dict[str, Any]:
        return dict(self.counts)


def first_neighbours(x: Tensor) -> Tensor:
    """Clusters of vectors that are linked by nearest neighbours: the first partition of FINCH.

    Sarfraz et al., CVPR 2019, Eq. 1 (FPL Eq. 4): with vᵢ the other element that is most similar to
    i by the cosine, the clusters are the connected components of ::

        A(i, j) = 1 if j = vᵢ or i = vⱼ or vᵢ = vⱼ

    Two elements that share a neighbour are connected through it, so that the edges ``(i, vᵢ)`` are
    enough. Every cluster has at least two elements, unless there is only one element.

    The result for vectors (N, D) is the number of each one's cluster, (N,), from 0 in order of appearance.

    Example:
        >>> first_neighbours(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.1], [0.1, 1.0]]))
        tensor([0, 1, 0, 1])
    """
    similarity = directions(x.double())
    similarity = (similarity @ similarity.T).fill_diagonal_(-math.inf)
    clusters = list(range(len(x)))
    for i, j in enumerate(similarity.argmax(dim=1).tolist()):
        first, second = sorted((clusters[i], clusters[j]))
        clusters = [first if cluster == second else cluster for cluster in clusters]
    numbers: Tensor = torch.tensor(clusters).unique(return_inverse=True)[1]
    return numbers


def prototype_contrast(
    z: Tensor, labels: Tensor, prototypes: Tensor, classes: Tensor, temperature: float
) -> Tensor:
    """Contrast of features with the prototypes of their own class and of the others (FPL Eq. 7 and 8).

    ::

        −log((Σ_(c∈Pʸ) e^(s(z,c))) / (Σ_(c∈P) e^(s(z,c)))),
        s(z, c) = (z · c) / (‖z‖ ‖c‖ τ)

    Features z are (B, D); each of their labels, (B,), has a prototype. Prototypes are (J, D), their classes
    (J,). The result, (B,), is 0 where there is no prototype of another class.

    Deviations:
        As printed, Eq. 7 could be read as multiplying by the temperature; here it divides, as in the public
        code.

    Example:
        >>> prototypes, classes = torch.eye(2), torch.tensor([0, 1])
        >>> prototype_contrast(torch.tensor([[2.0, 2.0]]), torch.tensor([0]), prototypes, classes, 0.1)
        tensor([0.6931])
    """
    work = working_precision(z)
    similarity = directions(work) @ directions(prototypes.to(work)).T / temperature
    own = similarity.masked_fill(labels[:, None] != classes, -math.inf)
    return (similarity.logsumexp(dim=1) - own.logsumexp(dim=1)).to(z.dtype)


def directions(x: Tensor) -> Tensor:
    """Rows scaled to length one; a row of zeros stays, with a finite gradient."""
    length = torch.linalg.vector_norm(x, dim=1, keepdim=True)
    return x / torch.where(length > 0, length, torch.ones_like(length))
