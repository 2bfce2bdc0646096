"""`ModalityNormalisation`: normalise each channel by its modality, with a plan's numbers."""

import math

import torch
from monai.transforms import NormalizeIntensity
from torch import Tensor

from medfedaug.config.plan import Plan


class ModalityNormalisation:
    """Normalise the channels of an image by the words of a plan's ``normalisation``.

    ::

        z_score: z = (x − x̄) / s(x)
        ct:      z = (min(max(x, l), h) − μ) / σ

    x are the channel's stored intensities before resampling; mean and standard deviation (population) are
    over x, and l, h, μ, σ are the plan's ``ct_intensities`` (nnU-Net, Isensee et al., Nature Methods 2021). A
    channel with ``none`` is unchanged. A constant channel, which stands for a missing one, becomes 0.

    Attributes:
        low: lower limit of each channel; -inf without clipping.
        high: upper limit of each channel; inf without clipping.
        mean: number subtracted from each channel; ``None`` for its own mean.
        deviation: divisor of each channel; ``None`` for its own standard deviation.

    Deviations:
        nnU-Net takes mean and standard deviation of the non-zero voxels where cropping to these removes more
        than a quarter of the volumes; here they are always of all voxels.
    """

    def __init__(self, plan: Plan, channels: int) -> None:
        words = plan.normalisation or ()
        repeats = channels if len(words) == 1 else 1
        numbers = iter((plan.ct_intensities or ()) * repeats)
        self.low, self.high = [-math.inf] * channels, [math.inf] * channels
        self.mean: list[float | None] = [None] * channels
        self.deviation: list[float | None] = [None] * channels
        for index, word in enumerate(words * repeats):
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
        """Return the normalised image, (C, *spatial)."""
        shape = (-1, *[1] * (image.ndim - 1))
        low, high = (torch.tensor(values).reshape(shape) for values in (self.low, self.high))
        clipped = image.clamp(low, high) if self.clips else image.clone()
        normalise = NormalizeIntensity(self.mean, self.deviation, channel_wise=True)
        normalised = torch.as_tensor(normalise(clipped)).as_subclass(Tensor)
        darkest, brightest = image.flatten(1).aminmax(dim=1)
        normalised[darkest == brightest] = 0
        return normalised
