"""FedDG: training for images in the style of other sites, with contrasted features at boundaries."""

from typing import Annotated

import torch
from annotated_types import Interval
from torch import Tensor

from medfedaug import functional as F
from medfedaug.errors import DataError
from medfedaug.methods.arguments import NotNegative, Positive
from medfedaug.methods.base import Method, ServerExchange, SiteExchange, SitePart
from medfedaug.methods.class_features import FeatureSite
from medfedaug.methods.contexts import Payload, ServerContext, SiteContext, Step
from medfedaug.methods.gathered import GatheredServer
from medfedaug.models.substitution import call_with
from medfedaug.research.functional.boundary import boundary_features, class_contrast


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
    and in the background around it (`functional.boundary_features`, `functional.class_contrast` with
    temperature τ): it draws boundaries of all sites together, and backgrounds, and separates the two. It is
    summed over the classes.

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
        ConfigError: for arguments out of range.
        DataError: for a site with images of several sizes whose numbers of low frequencies differ.

    Deviations:
        The paper's text was not available: the equations are from its public code, as far as it is complete.
        Its training script replaces the mean of each channel alone (``band=0``, λ = 1), and its demonstration
        interpolates as above with a band of 0.003; it draws one counterpart per image, sends an eighth of the
        spectra, clips gradients of the inner step to 100 and pixels to [0, 255], and stops the gradient at
        that of the inner step. ``beta``, ``gamma`` and ``temperature`` are its values. Its regions are nested
        (disc and cup); the classes of a label map exclude each other. Images are the network's input, after
        other methods' transforms, and padded. Amplitudes are divided by HW. Running statistics of norm layers
        are those of x alone. A site without other sites has no counterparts.
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


class FedDGSite(FeatureSite, SiteExchange):
    """The site's half: amplitudes, counterparts and the loss of the episode.

    Attributes:
        others: the amplitudes of each other site, (N, C, 2r + 1, r + 1).
    """

    def __init__(self, method: FedDG, context: SiteContext) -> None:
        super().__init__(context.network)
        self.method, self.context = method, context
        self.before_training = self
        self.others: list[Tensor] = []
        self._terms: list[Tensor] = []

    def collect(self) -> Payload:
        """Return the amplitudes of the training images."""
        parts = [F.low_amplitudes(x, self.method.band).cpu() for x in self.context.training_images()]
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

    def start_round(self) -> None:
        self._terms = []

    def loss(self, step: Step) -> Tensor | None:
        """Return L_seg(t; θ̂) + γ L_bd."""
        features = self.step_features()
        if not self.others:
            return None
        weights = self._inner_step(step)
        outputs = call_with(step.network, weights, self._counterparts(step.inputs))
        loss = step.criterion(outputs, step.targets)
        boundary = self._boundary_loss([features, self.last_features()], step.targets)
        terms = torch.stack([loss, boundary])
        self._terms.append(terms.detach())
        return terms[0] + self.method.gamma * terms[1]

    def _inner_step(self, step: Step) -> Payload:
        """Return θ̂, with copies of the buffers, so that passes of counterparts do not change them."""
        parameters = {name: p for name, p in step.network.named_parameters() if p.requires_grad}
        gradients = torch.autograd.grad(
            step.task_loss,
            list(parameters.values()),
            retain_graph=True,
            allow_unused=True,
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
        return F.mix_low_amplitudes(inputs, amplitudes, share.to(inputs.device), self.method.band)

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

    def metrics(self) -> dict[str, float]:
        """Return the means over the round of L_seg(t; θ̂) and of L_bd."""
        if not self._terms:
            return {}
        counterparts, boundary = torch.stack(self._terms).mean(dim=0).tolist()
        return {"counterparts": counterparts, "boundary": boundary}


class FedDGServer(GatheredServer):
    """The server's half: the amplitudes of all sites."""

    def __init__(self, in_channels: int) -> None:
        super().__init__({"amplitudes": (None, in_channels, None, None)})

    def check(self, payload: Payload) -> None:
        """Refuse negative amplitudes, and other frequencies than at other sites."""
        amplitudes = payload["amplitudes"]
        if not len(amplitudes) or bool((amplitudes < 0).any()):
            raise ValueError("no amplitudes, or a negative one")
        if amplitudes.shape[2] != 2 * amplitudes.shape[3] - 1:
            raise ValueError(f"amplitudes of shape {tuple(amplitudes.shape)}, expected (N, C, 2r + 1, r + 1)")
        for site, other in self.sites.items():
            if other["amplitudes"].shape[1:] != amplitudes.shape[1:]:
                raise ValueError(
                    f"{amplitudes.shape[3] - 1} low frequencies where site {site} has "
                    f"{other['amplitudes'].shape[3] - 1}: images of other sizes; set feddg.band=0 or resample"
                )
