"""FedMix: MixUp with the means of other sites' images, to first order."""

import torch
from torch import Tensor

from medfedaug.config.kinds import INTENSITY_MEAN
from medfedaug.config.run import derive_seed
from medfedaug.errors import DataError
from medfedaug.methods.arguments import AtLeastTwo, BelowOne
from medfedaug.methods.base import Method, ServerExchange, SiteExchange, SitePart
from medfedaug.methods.contexts import Payload, ServerContext, SiteContext, Step, Targets
from medfedaug.methods.exchanges import GatheredServer


class FedMix(Method):
    """Mean augmented federated learning with FedMix (Yoon et al., ICLR 2021, Proposition 1).

    Before training, sites send the means (x̄, ȳ) of groups of M images and labels, and receive those of all
    sites. Every step draws one of them, and expands the loss of mixing with it to first order in λ around the
    site's images:

        (1 − λ) ℓ(f((1 − λ)x), y) + λ ℓ(f((1 − λ)x), ȳ) + λ ∂ℓ/∂x · x̄,

    with the derivative at (1 − λ)x and y. With λ = 0 it is FedAvg, bit for bit.

    Means of M images are images of patients to those who know the rest: the method runs in simulations only.

    Args:
        mixing: λ.
        group: M, the number of images in a mean.

    Exchange, once: ``images`` (G, C, H, W) and ``labels``, probabilities of the classes (G, K), or
    (G, K, H, W) for segmentation, up; those of every site down.

    Raises:
        DataError: for a site with fewer than M training samples, and for images of several sizes.

    Deviations:
        The paper's listing takes the derivative of the first term, which has a factor 1 − λ: a difference of
        second order, like those that the expansion drops. Groups are the same in all runs. The paper is about
        classification; here a mean label map is a target like a mean label. Images are as in evaluation,
        normalised and not augmented.
    """

    name = "fedmix"
    requires = frozenset({"labels", "complete_labels"})
    provides = frozenset({"second_derivatives", "soft_labels"})
    excludes = frozenset({"counted_patients", "labels"})

    def __init__(self, mixing: BelowOne = 0.1, group: AtLeastTwo = 5) -> None:
        self.mixing, self.group = mixing, group

    def at_site(self, context: SiteContext) -> SitePart:
        return FedMixSite(self, context)

    def before_training(self, context: ServerContext) -> ServerExchange:
        return FedMixServer(context)


class FedMixSite(SitePart, SiteExchange):
    def __init__(self, method: FedMix, context: SiteContext) -> None:
        assert context.task is not None
        self.method, self.context, self.task = method, context, context.task
        self.before_training = self
        self.means: list[tuple[Tensor, Tensor]] = []
        self._image: Tensor | None = None

    @torch.no_grad()
    def collect(self) -> Payload:
        """Return the means of random groups: a mean of a patient's adjacent slices would show the patient."""
        groups = self._groups()
        images: list[Tensor] = [torch.zeros(())] * (int(groups.max()) + 1)
        labels, position = list(images), 0
        for inputs, targets in self.context.training_batches():
            for image, label in zip(inputs, self.task.probabilities(targets), strict=True):
                index = int(groups[position])
                self._same_size(image, images[index])
                images[index] = images[index] + image.double().cpu()
                labels[index] = labels[index] + label.double().cpu()
                position += 1
        for some in images:
            self._same_size(some, images[0])
        members = groups.bincount()
        totals = {"images": torch.stack(images), "labels": torch.stack(labels)}
        return {key: (t / members.view(-1, *[1] * (t.ndim - 1))).float() for key, t in totals.items()}

    def _same_size(self, image: Tensor, other: Tensor) -> None:
        if other.ndim and image.shape != other.shape:
            raise DataError(
                f"images of shape {tuple(image.shape)} and {tuple(other.shape)}: fedmix averages them",
                site=self.context.name,
                hint="Resample them to one size, in plane with --image-size, or use another method.",
            )

    def _groups(self) -> Tensor:
        """Divide the training samples at random into groups of ``group`` or more, reproducibly."""
        count, size, site = self.context.num_samples(), self.method.group, self.context.name
        if count < size:
            raise DataError(
                f"{count} training samples, and fedmix sends means of {size}",
                site=site,
                hint="Leave the site out or use another method.",
            )
        generator = torch.Generator().manual_seed(derive_seed("fedmix", site))
        return torch.randperm(count, generator=generator) % (count // size)

    def apply(self, payload: Payload) -> None:
        device = self.context.device
        sites = sorted(key.removeprefix("images/") for key in payload if key.startswith("images/"))
        self.means = [
            (image.to(device), label.to(device))
            for site in sites
            for image, label in zip(payload[f"images/{site}"], payload[f"labels/{site}"], strict=True)
        ]

    def mix(self, inputs: Tensor, targets: Targets) -> tuple[Tensor, Targets]:
        """Replace a batch x by (1 − λ)x, with both labels."""
        share = self.method.mixing
        self._image = None
        if not share or not self.means:
            return inputs, targets
        image, label = self.means[int(torch.randint(len(self.means), ()))]
        self._same_size(inputs[0], image)
        self._image = image.to(inputs)
        self._inputs, self._targets = ((1 - share) * inputs).requires_grad_(), targets
        weighted = [((1 - share) * weight, labels) for weight, labels in targets]
        return self._inputs, [*weighted, (share, label.expand(len(inputs), *label.shape))]

    def loss(self, step: Step) -> Tensor | None:
        """Return λ ∂ℓ/∂x · x̄, summed over the batch; ℓ is the mean over the batch."""
        if self._image is None:
            return None
        loss = torch.stack([w * step.criterion(step.outputs, labels) for w, labels in self._targets]).sum()
        (slope,) = torch.autograd.grad(loss, self._inputs, create_graph=True)
        return self.method.mixing * (slope * self._image).sum()


class FedMixServer(GatheredServer):
    """The server's half: the list of all sites' means."""

    def __init__(self, context: ServerContext) -> None:
        assert context.task is not None
        size = (None,) * context.task.spatial_dims
        labels = (None, context.task.num_classes, *(size if context.task.dense else ()))
        super().__init__({"images": (None, context.in_channels, *size), "labels": labels})
        self.kinds = {"images": INTENSITY_MEAN}

    def check(self, payload: Payload) -> None:
        images, labels = payload["images"], payload["labels"]
        fit = len(images) == len(labels) and (labels.ndim == 2 or images.shape[2:] == labels.shape[2:])
        if not fit or bool((labels < 0).any()) or bool(((labels.sum(dim=1) - 1).abs() > 1e-3).any()):
            raise ValueError("labels are not probabilities, or do not fit the images")
