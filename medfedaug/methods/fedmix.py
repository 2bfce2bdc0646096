"""FedMix: MixUp with the means of other sites' images, to first order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from monai.transforms import ResizeWithPadOrCrop
from monai.utils import convert_to_tensor
from torch import Tensor

from medfedaug.methods.arguments import AtLeastTwo, BelowOne
from medfedaug.methods.base import Method, ServerExchange, SiteExchange, SitePart
from medfedaug.methods.contexts import Payload, ServerContext, SiteContext, Step, Targets
from medfedaug.methods.gathered import GatheredServer, fewest_cases, sample_groups
from medfedaug.privacy.kinds import INTENSITY_MEAN


class FedMix(Method):
    """Mean augmented federated learning with FedMix (Yoon et al., ICLR 2021, Proposition 1).

    Before training, sites send the means (x̄, ȳ) of groups of M images and labels, and receive those of all
    sites. In every step one of them is drawn, and the loss of mixing with it is expanded to first order in λ
    around what the site has itself:

        (1 − λ) ℓ(f((1 − λ)x), y) + λ ℓ(f((1 − λ)x), ȳ) + λ ∂ℓ/∂x · x̄,

    the derivative taken at (1 − λ)x and y. With λ = 0 it is FedAvg, bit for bit.

    Means of M images leave the site: look at them before you agree to that. No group has fewer than M.

    Args:
        mixing: λ.
        group: M, the number of images in a mean.

    Exchange, once: ``images`` (G, C, H, W) and ``labels`` up, the latter as probabilities of the classes,
    (G, K), or (G, K, H, W) for segmentation; those of every site down.

    Raises:
        ConfigError: for arguments out of range.
        DataError: for a site with fewer than M training samples.

    Deviations:
        The paper's listing takes the derivative of the first term, which has a factor 1 − λ: a difference of
        second order, like those that the expansion drops. Groups are the same in all runs. The paper is about
        classification; here a mean label map is as good a target as a mean label. Means of another size than
        the batch are padded or cropped about their centre. Images are as the site sees them in evaluation,
        normalised and not augmented.
    """

    name = "fedmix"
    requires = frozenset({"labels", "complete_labels"})
    provides = frozenset({"soft_labels"})
    excludes = frozenset({"labels"})

    def __init__(self, mixing: BelowOne = 0.1, group: AtLeastTwo = 5) -> None:
        self.mixing, self.group = mixing, group

    def at_site(self, context: SiteContext) -> SitePart:
        return FedMixSite(self, context)

    def before_training(self, context: ServerContext) -> ServerExchange:
        return FedMixServer(context)


class FedMixSite(SitePart, SiteExchange):
    """The site's half."""

    def __init__(self, method: FedMix, context: SiteContext) -> None:
        assert context.task is not None
        self.method, self.context, self.task = method, context, context.task
        self.before_training = self
        self.cases_per_value = method.group
        self.means: list[tuple[Tensor, Tensor]] = []
        self._image: Tensor | None = None

    def fewest_cases(self) -> int:
        """The number of cases in the group of fewest cases: its slices can all be of one."""
        return fewest_cases("fedmix", self.context, self.method.group)

    @torch.no_grad()
    def collect(self) -> Payload:
        """Means of groups drawn at random: that of a patient's neighbouring slices would show the patient."""
        groups = sample_groups("fedmix", self.context, self.method.group)
        images: list[Tensor] = [torch.zeros(())] * (int(groups.max()) + 1)
        labels, position = list(images), 0
        for inputs, targets in self.context.training_batches():
            for image, label in zip(inputs, self.task.probabilities(targets), strict=True):
                index = int(groups[position])
                images[index] = _sum(images[index], image.double().cpu())
                labels[index] = _sum(labels[index], label.double().cpu())
                position += 1
        shape = _largest(images)
        members = groups.bincount().tolist()
        return {
            "images": torch.stack([_fit(x, shape) / n for x, n in zip(images, members, strict=True)]).float(),
            "labels": torch.stack(
                [_background(_fit(y, shape) / n) for y, n in zip(labels, members, strict=True)]
            ).float(),
        }

    def apply(self, payload: Payload) -> None:
        device = next(self.context.network.parameters()).device
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
        self._image = _fit(image, inputs.shape[2:]).to(inputs)
        label = _background(_fit(label, inputs.shape[2:]))
        self._inputs, self._targets = ((1 - share) * inputs).requires_grad_(), targets
        own = [((1 - share) * weight, labels) for weight, labels in targets]
        return self._inputs, [*own, (share, label.expand(len(inputs), *label.shape))]

    def loss(self, step: Step) -> Tensor | None:
        """λ ∂ℓ/∂x · x̄, summed over the batch, where ℓ is the mean over the batch."""
        if self._image is None:
            return None
        loss = torch.stack([w * step.criterion(step.outputs, labels) for w, labels in self._targets]).sum()
        (slope,) = torch.autograd.grad(loss, self._inputs, create_graph=True)
        return self.method.mixing * (slope * self._image).sum()


class FedMixServer(GatheredServer):
    """The server's half: the list of all sites' means."""

    def __init__(self, context: ServerContext) -> None:
        assert context.task is not None
        classes, size = context.task.num_classes, (None,) * context.task.spatial_dims
        super().__init__(
            {
                "images": (None, context.in_channels, *size),
                "labels": (None, classes, *size) if context.task.dense else (None, classes),
            }
        )
        self.kinds = {"images": INTENSITY_MEAN}

    def check(self, payload: Payload) -> None:
        """Refuse labels that do not fit the images or are no probabilities."""
        images, labels = payload["images"], payload["labels"]
        if len(images) != len(labels) or (labels.ndim > 2 and images.shape[2:] != labels.shape[2:]):
            raise ValueError(f"images {tuple(images.shape)} and labels {tuple(labels.shape)} do not fit")
        if bool((labels < 0).any()) or bool(((labels.sum(dim=1) - 1).abs() > 1e-3).any()):
            raise ValueError("labels that are no probabilities")


def _largest(images: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(max(sizes) for sizes in zip(*(image.shape[1:] for image in images), strict=True))


def _fit(image: Tensor, size: Sequence[int]) -> Tensor:
    """Pad or crop (C, *spatial) about its centre; a vector stays as it is."""
    if image.ndim == 1 or tuple(image.shape[1:]) == tuple(size):
        return image
    found: Tensor = convert_to_tensor(ResizeWithPadOrCrop(spatial_size=size)(image), track_meta=False)
    return found


def _sum(total: Tensor, image: Tensor) -> Tensor:
    if not total.ndim:
        return image
    shape = _largest([total, image])
    return _fit(total, shape) + _fit(image, shape)


def _background(label: Tensor) -> Tensor:
    """Make the probabilities add up to one where padding filled them with zeros, which is background."""
    if label.ndim == 1:
        return label
    label = label.clone()
    label[0] += 1 - label.sum(dim=0)
    return label
