"""FedHarmo (HarmoFL): images with the amplitudes of all sites' average image, and flat minima."""

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from monai.transforms import Transform
from monai.utils import CommonKeys as Keys
from monai.utils import convert_to_tensor
from torch import Tensor

from medfedaug.config.kinds import INTENSITY_MEAN
from medfedaug.errors import ConfigError, DataError
from medfedaug.methods.arguments import NotNegative
from medfedaug.methods.base import Method, ServerExchange, SiteExchange, SitePart
from medfedaug.methods.contexts import Payload, ServerContext, SiteContext, Step
from medfedaug.research.methods.fedsam import gradients_nearby


class FedHarmo(Method):
    """HarmoFL (Jiang, Wang and Dou, AAAI 2022), which the FedFA+ paper calls FedHarmo.

    Amplitude normalisation makes the sites' images alike: with F the Fourier transform of each channel, an
    image keeps its phases P = arg F(x) and gets the average amplitudes Ā,

        Ψ(x) = F⁻¹(Ā e^{iP}),    Ā = (1/N) Σₖ Āₖ,    Āₖ = the mean of ‖F(x)‖ over the images of site k,

    the former over N sites with equal weights. Client weight perturbation makes each site's minimum flat:

        δ = α ∇ℓ(θ)/‖∇ℓ(θ)‖₂,    θ ← θ − η ∇ℓ(θ + δ),

    the step of `medfedaug.research.methods.fedsam.FedSAM`. The images of all sites, also unseen ones, must
    have one size. An unseen site uses Ā too. Name this method before FedRDN: Ψ undoes most earlier changes
    of intensities.

    Args:
        perturbation: α; 0 for only amplitude normalisation.

    Exchange, once: ``amplitude`` (C, H, W // 2 + 1), Āₖ, up; Ā down.

    Raises:
        DataError: for a site whose images have several sizes.

    Deviations:
        The paper's Āₖ is a moving average over the batches of the first round, Ā ← (1 − ν)Ā + ν mean|F(x)|
        with ν = 0.1, which normalises the images of that round; sites exchange it once, after that round.
        Here Āₖ is the mean over all training images (slices of volumes), independent of their order, and is
        exchanged before training, so that the first round has Ā. Images are the network's input in
        evaluation, before padding, not augmented. A site that joins later uses the Ā of the others, which
        does not change. The paper's public code replaces only the amplitude of frequency zero,
        and declares ν an integer. A step makes the two passes of FedSAM.
    """

    name = "fedharmo"
    provides = frozenset({"method:fedsam"})

    def __init__(self, perturbation: NotNegative = 0.05) -> None:
        self.perturbation = perturbation

    def at_site(self, context: SiteContext) -> SitePart:
        return FedHarmoSite(self, context)

    def before_training(self, context: ServerContext) -> ServerExchange:
        if context.task is not None and context.task.cuts:
            raise ConfigError(
                "fedharmo averages the amplitudes of whole images, and those of patches differ: leave "
                "patch_size out of the plan, or random crops out of the Bundle"
            )
        return FedHarmoServer(context.in_channels)


class FedHarmoSite(SitePart, SiteExchange):
    def __init__(self, method: FedHarmo, context: SiteContext) -> None:
        self.method, self.context = method, context
        self.before_training = self
        self.amplitude: Tensor | None = None
        self._measuring: _Amplitudes | None = None

    def collect(self) -> Payload:
        """Return Āₖ of the images at the position of this method's transform."""
        return self.context.census.over_cases(self._by_case(), weights=self.context.samples_by_case())

    def _by_case(self) -> Iterator[Payload]:
        sizes: set[tuple[int, ...]] = set()
        for batches in self.context.case_batches():
            # The batches are padded. A transform in place of Ψ measures each image before.
            measuring = self._measuring = _Amplitudes()
            for _ in batches:
                pass
            self._measuring = None
            sizes |= measuring.sums.keys()
            if len(sizes) > 1:
                first, second = sorted(sizes)[:2]
                raise DataError(
                    f"images of different size, {first} and {second}: fedharmo averages their amplitudes",
                    site=self.context.name,
                    hint="Resample them to one size, in plane with --image-size, or use another method.",
                )
            total = next(iter(measuring.sums.values()), None)
            yield {} if total is None else {"amplitude": total / measuring.count}

    def apply(self, payload: Payload) -> None:
        self.amplitude = payload["amplitude"]

    def transforms(self, *, training: bool) -> Sequence[Transform]:
        """Return Ψ, in training and in evaluation; nothing until the server has sent Ā."""
        if self._measuring is not None:
            return [self._measuring]
        if self.amplitude is None:
            return ()
        return [NormalizeAmplitude(self.amplitude)]

    def gradients(self, step: Step, again: Callable[[], None]) -> None:
        if self.method.perturbation:
            gradients_nearby(step, again, self.method.perturbation)


class _Amplitudes(Transform):
    """Transform that adds up the amplitudes of images by size."""

    def __init__(self) -> None:
        self.sums: dict[tuple[int, ...], Tensor] = {}
        self.count = 0

    def __call__(self, data: Mapping[Hashable, Any]) -> Mapping[Hashable, Any]:
        image: Tensor = convert_to_tensor(data[Keys.IMAGE], track_meta=False)
        amplitude, size = amplitude_spectrum(image), tuple(image.shape[1:3])
        if amplitude.ndim == 4:  # a volume is normalised slice by slice
            amplitude = amplitude.mean(dim=-1)
        self.sums[size] = self.sums[size] + amplitude if size in self.sums else amplitude
        self.count += 1
        return data


class FedHarmoServer(ServerExchange):
    """The server's half: the unweighted mean over the sites, which does not change after it is sent.

    It decides the appearance of images: sites that join later use the mean of the sites that trained.

    Attributes:
        total: the sum over the sites so far; empty before the first.
        mean: the mean that was sent; empty before.
    """

    needed_at_inference = True

    def __init__(self, in_channels: int) -> None:
        self.shapes = {"amplitude": (in_channels, None, None)}
        self.kinds = {"amplitude": INTENSITY_MEAN}
        self.total: Payload = {}
        self.sites = 0
        self.mean: Payload = {}

    def accept(self, site: str, payload: Payload, weight: float = 1.0) -> None:
        """Add the tensors of one site, until the mean has been sent."""
        if self.mean:
            return
        self.total = {key: value.double() + self.total.get(key, 0.0) for key, value in payload.items()}
        self.sites += 1

    def result(self) -> Payload:
        if not self.mean:
            self.mean = {key: (value / self.sites).float() for key, value in self.total.items()}
        return self.mean

    def state(self) -> Payload:
        return self.mean

    def restore(self, state: Payload) -> None:
        self.mean = dict(state)

    def check(self, payload: Payload) -> None:
        """Refuse negative amplitudes, and another image size than at other sites."""
        amplitude, expected = payload["amplitude"], (self.mean or self.total).get("amplitude")
        if bool((amplitude < 0).any()) or (expected is not None and amplitude.shape != expected.shape):
            others = "" if expected is None else f", other sites have {tuple(expected.shape)}"
            raise ValueError(
                f"amplitudes of shape {tuple(amplitude.shape)}{others}: the images of all sites must have "
                "one size, and no amplitude is negative"
            )

    def summary(self) -> dict[str, Any]:
        """Return the root mean square of Ā over channels and frequencies."""
        mean = self.mean.get("amplitude")
        return {} if mean is None else {"amplitude": math.sqrt(float(mean.double().square().mean()))}


class NormalizeAmplitude(Transform):
    """Replace the amplitudes of an image's Fourier transform by Ā, (C, H, W // 2 + 1)."""

    def __init__(self, amplitude: Tensor) -> None:
        self.amplitude = amplitude.double()

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        image: Tensor = convert_to_tensor(data[Keys.IMAGE], track_meta=False)
        changed = normalise_amplitude(image, self.amplitude.to(image.device))
        return {**data, Keys.IMAGE: changed.float()}


def amplitude_spectrum(x: Tensor) -> Tensor:
    """The amplitudes of an image's Fourier transform ("amplitude normalization").

    ::

        A(u, v) = |F(u, v)|,   F(u, v) = Σ_(h,w) x(h, w) e^(−2πi(hu/H+wv/W))

    of each channel. The transform of real numbers is symmetric, so that half of it is enough.

    The result for an image (C, H, W) is (C, H, W // 2 + 1), float64; a volume (C, H, W, D) is transformed
    slice by slice.

    Example:
        >>> float(amplitude_spectrum(torch.tensor([[[1.0, 2.0, 3.0]]]))[0, 0, 0])
        6.0
    """
    amplitudes: Tensor = torch.fft.rfft2(x.double(), dim=(1, 2)).abs()
    return amplitudes


def normalise_amplitude(x: Tensor, amplitude: Tensor) -> Tensor:
    """An image with other amplitudes and its own phases ("amplitude normalization").

    ::

        Ψ(x) = F⁻¹(Ā e^(iP)),   P = arg F(x)

    x is an image (C, H, W) or a volume of slices (C, H, W, D); Ā is that of an image. The result is float64.

    Raises:
        ValueError: when the amplitudes belong to images of another size (names both).

    Deviations:
        A frequency whose amplitude is zero in an image has no phase, and stays zero: with a phase of zero, a
        slice without content would get one bright pixel. Computed in float64, which tells zero from small.

    Example:
        >>> x = torch.tensor([[[1.0, 2.0, 3.0]]])
        >>> [round(v, 4) for v in normalise_amplitude(x, 2 * amplitude_spectrum(x)).flatten().tolist()]
        [2.0, 4.0, 6.0]
    """
    spectrum = torch.fft.rfft2(x.double(), dim=(1, 2))
    if amplitude.shape != spectrum.shape[:3]:
        raise ValueError(
            f"amplitudes of shape {tuple(amplitude.shape)} do not belong to an image of shape "
            f"{tuple(x.shape)}: they are (C, H, W // 2 + 1), and all images must have one size"
        )
    own = spectrum.abs()
    present = own > 1e-12 * own.amax(dim=(1, 2), keepdim=True)
    phase = spectrum / torch.where(present, own, torch.ones_like(own))
    target = amplitude[..., None] if x.dim() == 4 else amplitude
    replaced = target * torch.where(present, phase, torch.zeros_like(phase))
    image: Tensor = torch.fft.irfft2(replaced, s=x.shape[1:3], dim=(1, 2))
    return image
