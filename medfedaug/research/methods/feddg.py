"""FedDG: training for images in the style of other sites, with contrasted features at boundaries."""

import math
from typing import Annotated, cast

import torch
from annotated_types import Interval
from torch import Tensor
from torch.nn.functional import interpolate

from medfedaug.errors import DataError
from medfedaug.functional.features import working_precision
from medfedaug.methods.arguments import NotNegative, Positive
from medfedaug.methods.base import Method, ServerExchange, SiteExchange, SitePart
from medfedaug.methods.contexts import Payload, ServerContext, SiteContext, Step
from medfedaug.methods.exchanges import GatheredServer
from medfedaug.methods.site_parts import FeatureSite, MeasuredSite
from medfedaug.models.entries import call_with


class FedDG(Method):
    """Episodic learning in continuous frequency space (ELCFS; Liu et al., FedDG, CVPR 2021).

    Before training, sites send the amplitudes of the low frequencies of their images, and receive those of
    all sites. In every step each image x gets a counterpart t in the style of another site: with amplitudes A
    and phases P of the Fourier transform of x, and amplitudes A' of a random image of that site, ::

        t = F⁻¹(((1 − λ) A + λ A′) e^(iP)) at low frequencies,   λ ~ U(0, 1).

    An episode takes a step on x and evaluates it on t (meta-train and meta-test)::

        θ̂ = θ − β ∇_θ L_seg(x; θ),
        min_θ L_seg(x; θ) + L_seg(t; θ̂) + γ L_bd(x, t; θ, θ̂).

    The boundary loss ``L_bd`` contrasts, for each class, the mean features of x and t at its boundary
    and in the background around it (`boundary_features`, `class_contrast` with temperature τ): it draws
    boundaries of all sites together, and backgrounds, and separates the two. It is summed over the classes.

    A step costs three to four times as much. Inference is the plain network's.

    Each amplitude spectrum belongs to an image: the method runs in simulations only.

    Args:
        band: low frequencies are those up to ⌊band · min(H, W)⌋ periods per image in each direction.
        beta: β.
        gamma: γ.
        temperature: τ.

    Exchange, once: ``amplitudes`` (N, C, 2r + 1, r + 1) up, one for each image, with r =
    ⌊band · min(H, W)⌋; those of every site down.

    Raises:
        DataError: for a site with images of several sizes whose numbers of low frequencies differ.

    Deviations:
        The paper's text was not available: the equations are from its public code, as far as it is complete.
        Its training script replaces the mean of each channel alone (``band=0``, λ = 1), and its demonstration
        interpolates as above with a band of 0.003; it draws one counterpart per image, sends an eighth of the
        spectra, clips gradients of the inner step to 100 and pixels to [0, 255], and stops the gradient at
        that of the inner step. ``beta``, ``gamma`` and ``temperature`` are its values. Its regions are nested
        (disc and cup); the classes of a label map exclude each other. Images are the network's input, after
        other methods' transforms, and padded. Amplitudes are divided by HW. Running statistics of norm layers
        are those of only x. A site without other sites has no counterparts.
    """

    name = "feddg"
    tasks = ("segmentation",)
    dimensions = (2,)
    requires = frozenset({"labels", "complete_labels"})
    provides = frozenset({"extra_passes", "second_derivatives"})
    excludes = frozenset({"counted_patients"})

    def __init__(
        self,
        band: Annotated[float, Interval(ge=0, lt=0.5)] = 0.01,
        beta: NotNegative = 0.001,
        gamma: NotNegative = 0.1,
        temperature: Positive = 0.05,
    ) -> None:
        self.band, self.beta, self.gamma, self.temperature = band, beta, gamma, temperature

    def at_site(self, context: SiteContext) -> SitePart:
        return FedDGSite(self, context)

    def before_training(self, context: ServerContext) -> ServerExchange:
        return FedDGServer(context.in_channels)


class FedDGSite(MeasuredSite, FeatureSite, SiteExchange):
    """The site's half: amplitudes, counterparts and the loss of the episode.

    Attributes:
        others: the amplitudes of each other site, (N, C, 2r + 1, r + 1).
    """

    measured = ("counterparts", "boundary")  # L_seg(t; θ̂) and L_bd

    def __init__(self, method: FedDG, context: SiteContext) -> None:
        super().__init__(context.network)
        self.method, self.context = method, context
        self.before_training = self
        self.others: list[Tensor] = []

    def collect(self) -> Payload:
        """Return the amplitudes of the training images."""
        parts = [low_amplitudes(x, self.method.band).cpu() for x in self.context.training_images()]
        if len({tuple(part.shape[2:]) for part in parts}) > 1:
            raise DataError(
                "images of different sizes have different numbers of low frequencies for feddg",
                site=self.context.name,
                hint="Resample them to one size, or set feddg.band=0.",
            )
        return {"amplitudes": torch.cat(parts).float()}

    def apply(self, payload: Payload) -> None:
        others = sorted(payload.keys() - {f"amplitudes/{self.context.name}"})
        self.others = [payload[key].to(self.context.device) for key in others]

    def loss(self, step: Step) -> Tensor | None:
        """Return L_seg(t; θ̂) + γ L_bd."""
        features = self.step_features()
        if not self.others:
            return None
        weights = self._inner_step(step)
        outputs = call_with(step.network, weights, self._counterparts(step.inputs))
        loss = step.criterion(outputs, step.targets)
        boundary = self._boundary_loss([features, self.last_features()], step.targets)
        self.measure(loss, boundary)
        return loss + self.method.gamma * boundary

    def _inner_step(self, step: Step) -> Payload:
        """Return θ̂, with copies of the buffers, so that passes of counterparts do not change them."""
        parameters = {name: p for name, p in step.network.named_parameters() if p.requires_grad}
        gradients = torch.autograd.grad(
            step.task_loss, list(parameters.values()), retain_graph=True, allow_unused=True
        )
        moved = {
            name: p if g is None else p - self.method.beta * g
            for (name, p), g in zip(parameters.items(), gradients, strict=True)
        }
        return {**moved, **{name: buffer.clone() for name, buffer in step.network.named_buffers()}}

    @torch.no_grad()
    def _counterparts(self, inputs: Tensor) -> Tensor:
        sites = torch.randint(len(self.others), (len(inputs),)).tolist()
        place, share = torch.rand(2, len(inputs))  # the image of the site, and λ
        pairs = zip((self.others[site] for site in sites), place.tolist(), strict=True)
        amplitudes = torch.stack([images[int(draw * len(images))] for images, draw in pairs])
        return mix_low_amplitudes(inputs, amplitudes, share.to(inputs.device), self.method.band)

    def _boundary_loss(self, features: list[Tensor], targets: Tensor) -> Tensor:
        task = self.context.task
        assert task is not None
        masks = task.probabilities(targets)[:, 1:].float()
        passes = [boundary_features(z, masks) for z in features]
        at = torch.cat([boundary for boundary, _, _ in passes])
        around = torch.cat([background for _, background, _ in passes])
        present = torch.cat([mask for _, _, mask in passes])
        total = at.sum() * 0
        for region in range(masks.shape[1]):
            h = torch.cat([at[present[:, region], region], around[present[:, region], region]])
            kinds = torch.arange(len(h), device=h.device) < len(h) // 2
            total = total + class_contrast(h, kinds, self.method.temperature)
        return total


class FedDGServer(GatheredServer):
    """The server's half: the amplitudes of all sites."""

    def __init__(self, in_channels: int) -> None:
        super().__init__({"amplitudes": (None, in_channels, None, None)})

    def check(self, payload: Payload) -> None:
        """Refuse negative amplitudes, and other frequencies than at other sites."""
        amplitudes = payload["amplitudes"]
        sizes = amplitudes.shape
        if not len(amplitudes) or bool((amplitudes < 0).any()) or sizes[2] != 2 * sizes[3] - 1:
            raise ValueError(f"not amplitudes (N, C, 2r + 1, r + 1), none of them negative: {tuple(sizes)}")
        for site, other in self.sites.items():
            if other["amplitudes"].shape[1:] != sizes[1:]:
                raise ValueError(
                    f"{sizes[3] - 1} low frequencies where site {site} has "
                    f"{other['amplitudes'].shape[3] - 1}: images of other sizes; set feddg.band=0 or resample"
                )


def boundary_features(z: Tensor, masks: Tensor, outside: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    """The mean features at the boundary of each region, and of the background around it (FedDG).

    ::

        h_bd = (Σₓ z(x) b(x)) / (Σₓ b(x)),   h_bg = (Σₓ z(x) o(x)) / (Σₓ o(x))

    where b is the region without its erosion by one pixel, and o its dilation by some pixels without the
    region.

    Features z, (B, D, h, w), are resized to the size of the regions, (B, R, H, W); the background is
    ``outside`` pixels wide. The result is both features, (B, R, D), and a mask of the regions that have a
    boundary and background, (B, R).

    Deviations:
        Erosion and dilation are MONAI's, by squares. Outside of the image a region continues as at the edge,
        so that the edge is not a boundary.

    Example:
        >>> mask = torch.zeros(1, 1, 5, 5)
        >>> mask[..., 2, 2] = 1
        >>> at, around, present = boundary_features(mask, mask, outside=1)
        >>> at.flatten().tolist(), around.flatten().tolist(), bool(present)
        ([1.0], [0.0], True)
    """
    # Imported here: reading images needs this package, and MONAI takes seconds.
    from monai.transforms.utils_morphological_ops import dilate, erode

    z, masks = working_precision(z), working_precision(masks)
    if z.shape[2:] != masks.shape[2:]:
        z = interpolate(z, size=masks.shape[2:], mode="bilinear", align_corners=False)
    separate = masks.flatten(0, 1)[:, None]  # as channels, MONAI would erode and dilate them together
    boundary = (separate - cast(Tensor, erode(separate, 3))).view_as(masks)
    around = (cast(Tensor, dilate(separate, 2 * outside + 1)) - separate).view_as(masks)
    present = (boundary.sum(dim=(2, 3)) > 0) & (around.sum(dim=(2, 3)) > 0)
    return _pooled(z, boundary), _pooled(z, around), present


def _pooled(z: Tensor, weights: Tensor) -> Tensor:
    """(B, D, H, W) and (B, R, H, W) -> (B, R, D)."""
    weights = weights.to(z)
    total = torch.einsum("bdhw,brhw->brd", z, weights)
    return total / weights.sum(dim=(2, 3)).clamp_min(1)[..., None]


def class_contrast(h: Tensor, kinds: Tensor, temperature: float) -> Tensor:
    """InfoNCE between features of the same kind and of others (FedDG, NT-Xent).

    ::

        ℓ(m, p) = −log(e^(sₘₚ/τ) / (e^(sₘₚ/τ) + Σ_(q∈Nₘ) e^(s_mq/τ))),
        L = mean_(m,p) ℓ(m, p)

    over all ordered pairs m, p of the same kind, with the cosine s as similarity and Nₘ all features
    of another kind than m.

    Features h are (N, D), their kinds (N,), and τ is the temperature. Without a pair, or anything else,
    it is 0.

    Example:
        >>> h = torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0]])
        >>> round(float(class_contrast(h, torch.tensor([0, 0, 1]), temperature=1.0)), 4)  # log(1 + e⁻¹)
        0.3133
    """
    h = working_precision(h)
    h = h / h.norm(dim=1, keepdim=True).clamp_min(torch.finfo(h.dtype).eps)
    scores = h @ h.T / temperature
    same = kinds[:, None] == kinds[None]
    pairs = same & ~torch.eye(len(h), dtype=torch.bool, device=h.device)
    # With a single kind nothing is counted. A mask, unlike a branch, does not wait for a GPU.
    several = ~same.all()
    others = scores.masked_fill(same & several, -torch.inf).logsumexp(dim=1, keepdim=True)
    counted = pairs & several
    terms = (torch.logaddexp(scores, others) - scores).masked_fill(~counted, 0)
    return terms.sum() / counted.sum().clamp_min(1)


def low_amplitudes(x: Tensor, band: float) -> Tensor:
    """The amplitudes of the low frequencies of images (FedDG, "continuous frequency space interpolation").

    ::

        A(u, v) = |F(u, v)| / (HW),   −r ≤ u ≤ r, 0 ≤ v ≤ r,   r = ⌊band · min(H, W)⌋

    with F the Fourier transform; the other half follows by symmetry. The factor makes the first, u = v =
    0, the mean of the image, whatever its size.

    Images are (B, C, H, W). A band of 0 has only the mean, one just below 0.5 nearly everything. The result
    is (B, C, 2r + 1, r + 1), float64; u from -r on.

    Example:
        >>> low_amplitudes(torch.tensor([[[[1.0, 2.0, 3.0]]]]), 0)
        tensor([[[[2.]]]], dtype=torch.float64)
    """
    rows, columns = _low(x, band)
    spectrum = torch.fft.rfft2(working_precision(x).double(), norm="forward")
    amplitudes: Tensor = spectrum[:, :, rows[:, None], columns].abs()
    return amplitudes


def mix_low_amplitudes(x: Tensor, amplitudes: Tensor, share: Tensor, band: float) -> Tensor:
    """Images whose low frequencies are between their own and other amplitudes (FedDG).

    ::

        x′ = F⁻¹(((1 − λ) A + λ A′) e^(iP)),   A = |F(x)|, P = arg F(x)

    at the frequencies of `low_amplitudes`; the others stay as they are.

    Each image has its own A', as `low_amplitudes` gives it, and its own λ, (B,).

    Deviations:
        A frequency whose amplitude is zero in an image has no phase, and stays zero.

    Example:
        >>> x, other = torch.tensor([[[[1.0, 2.0, 3.0]]]]), torch.tensor([[[[4.0]]]])
        >>> mix_low_amplitudes(x, other, torch.tensor([0.5]), 0)
        tensor([[[[2., 3., 4.]]]])
    """
    rows, columns = _low(x, band)
    spectrum = torch.fft.rfft2(working_precision(x).double(), norm="forward")
    low = spectrum[:, :, rows[:, None], columns]
    own = low.abs()
    present = own > 1e-12 * spectrum.abs().amax(dim=(2, 3), keepdim=True)
    share = share.to(own).reshape(-1, 1, 1, 1)
    target = (1 - share) * own + share * amplitudes.to(own)
    scale = torch.where(present, target / torch.where(present, own, torch.ones_like(own)), 0.0)
    spectrum = spectrum.clone()
    spectrum[:, :, rows[:, None], columns] = low * scale
    mixed: Tensor = torch.fft.irfft2(spectrum, s=x.shape[2:], norm="forward").to(x.dtype)
    return mixed


def _low(x: Tensor, band: float) -> tuple[Tensor, Tensor]:
    """Indices of rows and columns of the low frequencies."""
    height, width = x.shape[2:]
    reach = math.floor(band * min(height, width))
    rows = torch.arange(-reach, reach + 1, device=x.device) % height
    return rows, torch.arange(reach + 1, device=x.device)
