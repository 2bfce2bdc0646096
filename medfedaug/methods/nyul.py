"""Histogram standardisation: every image gets the landmarks of the federation's standard histogram."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from monai.transforms import Transform
from monai.utils import CommonKeys as Keys
from torch import Tensor

from medfedaug import functional as F
from medfedaug.data.preparation.preparation import LANDMARKS
from medfedaug.methods.average import FinalMeanServer
from medfedaug.methods.base import Method, ServerExchange, SiteExchange, SitePart
from medfedaug.methods.contexts import Bounds, Contributions, Payload, ServerContext, SiteContext
from medfedaug.privacy.kinds import HISTOGRAM
from medfedaug.transforms import StandardizeHistogramd

_STEPS = len(F.PERCENTILES) - 1


class Nyul(Method):
    """Histogram standardisation (Nyúl and Udupa, 1999; Nyúl, Udupa and Zhang, IEEE TMI 2000), federated.

    In its first step the method learns a standard scale. The landmarks
    ``l_(i,0) ≤ … ≤ l_(i,10)`` of image i are percentiles of its foreground, in each channel;
    brought to [0, 1], they are averaged::

        sⱼ = (1/N) Σₖ (1/nₖ) Σ_(i∈k) (l_(i,j) − l_(i,0)) / (l_(i,10) − l_(i,0))

    over the images of a site k, and over the N sites. In the second step, in training and at test, every
    image is mapped by the lines between ``(l_(i,j), sⱼ)`` (`medfedaug.functional.map_landmarks`). The
    map depends on the image alone: at test no site, also no unseen one, needs statistics.

    Exchange, once: ``steps`` (C, 10) up, the mean of the distances between adjacent landmarks on the scale
    from 0 to 1: each row adds up to 1, like a histogram; the mean over the sites down.

    Deviations:
        This follows descriptions of the papers and common public implementations, with their percentiles: 1,
        10, 20, ..., 90 and 99 (the papers discuss several choices, and 0 and 99.8 for the ends). The
        foreground is everything brighter than the darkest voxel; the papers cut off the background at a
        threshold of the image. The papers average over all images in one place; here sites have equal
        weights, for any number of images. The standard scale runs from 0 to 1. Equal landmarks violate the
        papers' condition for a map without loss: no line lies between them. The landmarks are those of the
        whole prepared image, before augmentation, also for slices or patches; at test they are those of the
        image before it is resized in its plane. A constant channel becomes 0, and is not in the mean. Sites
        that join later use the existing scale.
    """

    name = "nyul"
    requires = frozenset({"landmarks"})
    provides = frozenset({"normalised_input"})
    excludes = frozenset({"normalised_input"})
    statistics_over = None

    def at_site(self, context: SiteContext) -> SitePart:
        return NyulSite(context)

    def before_training(self, context: ServerContext) -> ServerExchange:
        return NyulServer(context.in_channels)


class NyulSite(SitePart, SiteExchange):
    """The site's half.

    Attributes:
        standard: s, (C, 11), once the server has sent it.
    """

    def __init__(self, context: SiteContext) -> None:
        self.context = context
        self.before_training = self
        self.standard: Tensor | None = None

    def collect(self) -> Payload:
        """Return the mean steps of the site's images; 0 for a channel that is constant in all of them."""
        rows = ({"steps": _steps(landmarks)} for landmarks in self.context.case_landmarks())
        return self.context.census.over_cases(rows)

    def contributions(self, bounds: Bounds) -> Contributions:
        """Return the steps of each image; NaN for a constant channel."""
        values = ({"steps": _steps(landmarks)} for landmarks in self.context.case_landmarks())
        return Contributions({"steps": HISTOGRAM}, values)

    def privatised(self, means: Payload, cases: int) -> Payload:
        """Return the noisy steps; 0 for channels that the site lists as missing, which reveals no image."""
        steps = means["steps"].clone()
        steps[[*self.context.missing_channels]] = 0
        return {"steps": steps.float()}

    def apply(self, payload: Payload) -> None:
        steps = payload["steps"].double().cpu()
        steps = torch.where(steps.sum(dim=1, keepdim=True) > 0, steps, torch.ones_like(steps))
        scale = torch.cat([torch.zeros(len(steps), 1), steps.cumsum(dim=1)], dim=1)
        self.standard = scale / scale[:, -1:]

    def transforms(self, *, training: bool) -> Sequence[Transform]:
        """Return the map, in training and in evaluation; nothing until the server has sent the scale."""
        if self.standard is None:
            return ()
        return [StandardizeHistogramd(Keys.IMAGE, self.standard, landmarks_key=LANDMARKS)]


class NyulServer(FinalMeanServer):
    """The server's half: the mean over the sites, (C, 10)."""

    def __init__(self, in_channels: int) -> None:
        super().__init__({"steps": (in_channels, _STEPS)}, {"steps": HISTOGRAM})

    def check(self, payload: Payload) -> None:
        """Refuse rows that do not ascend from 0 to 1; a row of zeros is a channel without images."""
        rows = payload["steps"].double()
        total = rows.sum(dim=1)
        if bool((rows < 0).any()) or bool(((total - 1).abs().minimum(total) > 1e-3).any()):
            raise ValueError("steps between landmarks are numbers from 0 on that add up to 1 in each channel")

    def summary(self) -> dict[str, Any]:
        """Return the mean steps by channel; their sum is the share of sites with the channel."""
        return {} if not self.mean else {"steps": self.mean["steps"].tolist()}


def _steps(landmarks: Tensor) -> Tensor:
    """(C, 11) -> (C, 10), each row adding up to 1; NaN where all landmarks are equal."""
    steps = landmarks.double().diff(dim=1)
    return steps / steps.sum(dim=1, keepdim=True)
