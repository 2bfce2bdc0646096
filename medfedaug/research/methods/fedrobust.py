"""FedRobust: each site trains on its images under the hardest affine shift for the model."""

from typing import Any

import torch
from torch import Tensor, nn

from medfedaug.errors import ConfigError
from medfedaug.methods.arguments import NotNegative, Positive
from medfedaug.methods.base import Method, Payload, SiteContext, SitePart, Step


class FedRobust(Method):
    """Training that is robust to affine shifts of the images (Reisizadeh et al., NeurIPS 2020).

    Every site i has its own shift, the worst one for the model under a penalty::

        min_w (1/n) Σᵢ max_(Λᵢ,δᵢ) [E ℓ(f_w(Λᵢ x + δᵢ), y) − λ ‖Λᵢ − I‖_F² − λ ‖δᵢ‖²]

    Λ (C, C) maps the channels of each voxel, and δ (C,) moves them: brightness, contrast and the mixing of
    colours or sequences. Gradient descent ascent: with each descent step of the model, the shift takes an
    ascent step, ::

        Λ ← Λ + η (∇_Λ ℓ − 2λ (Λ − I)),   δ ← δ + η (∇_δ ℓ − 2λ δ),

    both at the previous model and shift, from one pass. A shift starts with Λ = I and δ = 0, stays at its
    site across rounds and restarts, and is not used in evaluation. With η = 0 it is FedAvg, bit for bit.

    Args:
        penalty: λ.
        learning_rate: η, the ascent's. Λ − I settles at ∇ℓ/2λ, in about 1/2ηλ steps.

    Deviations:
        The paper's Λ is over all values of a flattened image: 10 GB for a slice of 224 x 224, whose label map
        would not follow. Its penalties of Λ and δ may differ. η and λ are our choices. The loss is the step's
        total, with the terms of other methods, and every training pass of the network has the shifted images.
        With FedSAM ascent and descent are along the gradient at the weights nearby. In the public code of
        FedRBN (Hong et al., AAAI 2023), which compares with FedRobust, Λ is over all pixels, starts with 0
        instead of I, and takes several steps of 1/2λ per batch.
    """

    name = "fedrobust"

    def __init__(self, penalty: Positive = 1.0, learning_rate: NotNegative = 0.1) -> None:
        rate = learning_rate * penalty
        if rate >= 1:
            raise ConfigError(f"fedrobust: learning_rate x penalty is {rate:g}; from 1 on the steps diverge")
        self.penalty, self.learning_rate = penalty, learning_rate

    def at_site(self, context: SiteContext) -> SitePart:
        return FedRobustSite(self, context)


class FedRobustSite(SitePart):
    """The site's half, the whole method."""

    def __init__(self, method: FedRobust, context: SiteContext) -> None:
        self.method, self.network = method, context.network
        self.affine: tuple[Tensor, Tensor] | None = None  # made for the channels of the first batch
        # A hook, unlike `mix`, gives each pass its own graph, so that the gradients of other passes, and
        # gradients with respect to the batch, are those of the shifted images.
        context.network.register_forward_pre_hook(self._shift)

    def _shift(self, network: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not network.training:
            return None
        inputs: Tensor = args[0]
        channels = inputs.shape[1]
        matrix, shift = self.affine or self._set(torch.eye(channels), torch.zeros(channels))
        # Drop gradients of earlier passes: the ascent is along the gradient of the model's step.
        matrix.grad = shift.grad = None
        return (affine_shift(inputs, matrix, shift), *args[1:])

    def _set(self, matrix: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        to = next(self.network.parameters())
        # Copies, so that the kept state of a round does not change in the next one.
        self.affine = (matrix.to(to, copy=True).requires_grad_(), shift.to(to, copy=True).requires_grad_())
        return self.affine

    @torch.no_grad()
    def before_step(self, step: Step) -> None:
        """Take one step of the ascent; the optimiser then takes the descent step, from the same pass."""
        assert self.affine is not None
        matrix, shift = self.affine
        if matrix.grad is None or shift.grad is None:  # the loss does not depend on images
            return
        rate, penalty = self.method.learning_rate, self.method.penalty
        matrix += rate * (matrix.grad - 2 * penalty * _deviation(matrix))
        shift += rate * (shift.grad - 2 * penalty * shift)

    @torch.no_grad()
    def metrics(self) -> dict[str, float]:
        """Return the size of the shift: ‖Λ − I‖ and ‖δ‖."""
        if self.affine is None:
            return {}
        matrix, shift = self.affine
        return {"matrix": float(_deviation(matrix).norm()), "shift": float(shift.norm())}

    def state(self) -> Payload:
        if self.affine is None:
            return {}
        matrix, shift = self.affine
        return {"matrix": matrix.detach(), "shift": shift.detach()}

    def restore(self, state: Payload) -> None:
        self._set(state["matrix"], state["shift"])


def _deviation(matrix: Tensor) -> Tensor:
    return matrix - torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)


def affine_shift(x: Tensor, matrix: Tensor, shift: Tensor) -> Tensor:
    """An affine map of every voxel's channels (FedRobust's ``Λ x + δ``).

    Images are (B, C, *spatial), Λ is (C, C) and δ (C,).

    Example:
        >>> affine_shift(torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.ones(2))
        tensor([[3., 2.]])
    """
    return (x.movedim(1, -1) @ matrix.T + shift).movedim(-1, 1)
