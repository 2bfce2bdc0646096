"""`ModalityNormalisation`: normalise each channel as its modality asks for, as a plan says."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from monai.transforms import NormalizeIntensity
from torch import Tensor

from medfedaug.config.plan import Plan


class ModalityNormalisation:
    r"""Normalise the channels of an image, each by its word in a plan's ``normalisation``.

    .. math:: z = \frac{x - \bar x}{s(x)} \;\text{(z\_score)}, \qquad
              z = \frac{\min(\max(x, l), h) - \mu}{\sigma} \;\text{(ct)}

    x are the channel's intensities as stored, in the box that the plan keeps and before resampling; mean
    and deviation (population) are those of the image itself, and l, h, μ, σ the plan's ``ct_intensities``
    (nnU-Net, Isensee et al., Nature Methods 2021). A channel with ``none`` stays as it is. A constant channel
    becomes 0: it is one that the site does not have.

    Attributes:
        low: what each channel is clipped to from below; -inf where it is not.
        high: the same from above.
        mean: what is subtracted from each channel; ``None`` for its own mean.
        deviation: what it is divided by; ``None`` for its own deviation.

    Deviations:
        nnU-Net takes mean and deviation of the non-zero voxels where cropping to these removes more than a
        quarter of the volumes; here they are always of all voxels in the box.
    """

    def __init__(self, plan: Plan, channels: int) -> None:
        words: Sequence[str] = plan.normalisation or ()
        words = [*words] * channels if len(words) == 1 else words
        numbers = iter((plan.ct_intensities or ()) * (channels if len(plan.normalisation or ()) == 1 else 1))
        self.low, self.high = [-math.inf] * channels, [math.inf] * channels
        self.mean: list[float | None] = [None] * channels
        self.deviation: list[float | None] = [None] * channels
        for index, word in enumerate(words):
            if word == "ct":
                self.low[index], self.high[index] = next(numbers), next(numbers)
                self.mean[index], self.deviation[index] = next(numbers), next(numbers)
            elif word == "none":
                self.mean[index], self.deviation[index] = 0.0, 1.0

    @property
    def clips(self) -> bool:
        """Return whether any channel is clipped."""
        return any(map(math.isfinite, self.low))

    def __call__(self, image: Tensor) -> Tensor:
        """Normalise an image, (C, *spatial), of which nothing is changed."""
        shape = (-1, *[1] * (image.ndim - 1))
        low, high = (torch.tensor(values).reshape(shape) for values in (self.low, self.high))
        clipped = image.clamp(low, high) if self.clips else image.clone()
        normalise = NormalizeIntensity(self.mean, self.deviation, channel_wise=True)
        found = torch.as_tensor(normalise(clipped)).as_subclass(Tensor)
        darkest, brightest = image.flatten(1).aminmax(dim=1)
        found[darkest == brightest] = 0
        return found
