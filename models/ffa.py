"""The federated feature augmentation (FFA) layer of FedFA."""

# TorchScript reads the annotations of the buffers, so they must not be postponed to strings.
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, distributed

from medfedaug.errors import warn
from medfedaug.functional import augmentation_spread, feature_statistics, perturb_features
from medfedaug.functional.features import plain_tensor
from medfedaug.models.stages import StageLayer

_VARIANCES = ("adaptive", "direct", "client", "random")
_RUNNING = ("reset", "continue")

_FEW_POSITIONS = 9
"""With 2 x 2 positions FedFA lost to FedAvg, with 5 x 5 it did not (``docs/results/office``)."""


class FFALayer(StageLayer):
    """Augment the statistics of features by as much as the sites differ (FedFA+ Algorithm 2).

    ::

        x̂ = σ̂ (x − μ)/σ + μ̂,   μ̂ ~ N(μ, (γ_μ + 1) ⊙ Σ_μ²),
        σ̂ ~ N(σ, (γ_σ + 1) ⊙ Σ_σ²)

    where μ and σ are the statistics of each image and channel (Eq. 2), Σ² their
    variance in the batch (Eq. 4), and γ comes from the server (Eq. 6 and 7, `set_gamma`). The
    layer keeps running statistics for the server (Eq. 5, `statistics`)::

        μ̄ ← α μ̄ + (1 − α) E_B[μ],   σ̄ ← α σ̄ + (1 − α) E_B[σ]

    In training the layer is active with probability `prob`, drawn once per call from torch's generator; in
    evaluation it returns its argument itself. It has no parameters, and its buffers are not part of the state
    dict, so that a network has the same checkpoint with and without it. In each round of a federation the
    order is `start_round`, `set_gamma`, training, `statistics`.

    A batch of one image has no variance over the batch: unless `variance="random"`, the layer is then
    inactive and warns. It also warns of fewer than nine positions, whose standard deviation is mostly chance.

    If several processes train together (`DistributedDataParallel`, in the group of `torch.distributed`),
    Σ² and the running statistics are over the batches of all processes, as in one process with
    the same images: the layer exchanges 2C numbers per image of the batch and call, and all processes share
    the draw whether it is active. The process of an image draws its noise and counts it. Each process must
    call the layer equally often.

    Until the first `set_gamma`, γ is zero: the layer augments by the site's own variance, as in
    FedFA-C and in training without a federation. `medfedaug.runs.finished_run.FinishedRun.gamma` has the
    γ of a finished run.

    Shapes:
        Input and output (B, C, *spatial), 1D, 2D or 3D. γ and the running statistics (C,). The
        running statistics have the units of the features.

    Args:
        num_channels: number of channels C.
        prob: probability p that the layer is active in a call.
        momentum: α.
        eps: added to the spatial variance before its root.
        variance: the variances of the Gaussians. "adaptive": as above. "direct": the same formula, with
            unmodulated variances across sites from the server (Table 11). "client": Σ² alone
            (FedFA-C). "random": standard deviation 0.5 in every channel (FedFA-R).
        running: the effect of `start_round` on the running statistics. "reset": back to 0 and 1 (Algorithm
            1). "continue": none, as in the paper's public code.
        bias_correction: let `statistics` remove the share of the start values. Only with `running="reset"`:
            continued statistics would be corrected again in every round.

    Attributes:
        num_active_batches: calls since the running statistics were reset in which the layer was active.
        sampled_std_count: number of σ̂ sampled so far (one per image and channel).
        negative_std_count: number of negative σ̂ among them.

    Raises:
        ValueError: when an argument is out of its range; on a call in training, when the features are not
            (B, num_channels, *spatial).

    Deviations:
        * The papers print no `eps`; it is inside the root, so that σ and its running average
          include it.
        * A sampled σ̂ can be negative, which mirrors the channel about its mean. The papers
          do not mention it: the sign is kept, and counted.
        * The running statistics of Algorithm 2 are accumulated when the layer is active; Algorithm 1 starts
          them at 0 and 1 every round, so that with α = 0.99 and few steps they stay near 0 and
          1. That is the default here too; `bias_correction` divides by ``1 − αᵗ``.
        * The paper's public code differs from the paper: it has the unbiased variance over the batch, and
          continues the running statistics across rounds.

    Example:
        >>> layer = FFALayer(2, prob=1.0)
        >>> layer.set_gamma(torch.tensor([0.5, 1.5]), torch.ones(2))
        >>> _ = torch.manual_seed(0)
        >>> x = torch.rand(4, 2, 8, 8)
        >>> y = layer(x)
        >>> y.shape, bool((y != x).any()), layer.eval()(x) is x
        (torch.Size([4, 2, 8, 8]), True, True)
        >>> mean, std = layer.statistics()
        >>> torch.allclose(mean, 0.01 * x.mean(dim=(0, 2, 3)))
        True
    """

    kind = "FFA"
    slug = "ffa"

    running_mean: Tensor
    running_std: Tensor
    gamma_mean: Tensor
    gamma_std: Tensor
    num_active_batches: Tensor
    negative_std_count: Tensor
    sampled_std_count: Tensor

    def __init__(
        self,
        num_channels: int,
        prob: float = 0.5,
        momentum: float = 0.99,
        eps: float = 1e-6,
        variance: str = "adaptive",
        running: str = "reset",
        bias_correction: bool = False,
    ) -> None:
        super().__init__(num_channels)
        for fits, wrong in (
            (0.0 <= prob <= 1.0, f"prob is {prob}, expected a probability"),
            (0.0 <= momentum < 1.0, f"momentum is {momentum}, expected a number in [0, 1)"),
            (eps >= 0.0, f"eps is {eps}, expected a number that is not negative"),
            (variance in _VARIANCES, f"variance is '{variance}', expected one of {', '.join(_VARIANCES)}"),
            (running in _RUNNING, f"running is '{running}', expected one of {', '.join(_RUNNING)}"),
            (not bias_correction or running == "reset", 'bias_correction needs running="reset"'),
        ):
            if not fits:
                raise ValueError(wrong)
        self.prob = float(prob)
        self.momentum = float(momentum)
        self.eps = float(eps)
        self.variance = variance
        self.running = running
        self.bias_correction = bias_correction

        self.register_buffer("running_mean", torch.zeros(num_channels), persistent=False)
        self.register_buffer("running_std", torch.ones(num_channels), persistent=False)
        self.register_buffer("gamma_mean", torch.zeros(num_channels), persistent=False)
        self.register_buffer("gamma_std", torch.zeros(num_channels), persistent=False)
        for name in ("num_active_batches", "negative_std_count", "sampled_std_count"):
            self.register_buffer(name, torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Augment features in training (Algorithm 2, by line), return them in evaluation.

        Args:
            x: features, (B, C, *spatial).

        Returns:
            Features of the same shape and dtype.
        """
        if not self.training:
            return x
        self._check(x)
        together = False
        if not torch.jit.is_scripting():
            together = several_processes()
        if x.shape[0] == 1 and self.variance != "random" and not together:
            return x

        draw = self._draw(x, together)
        active: Tensor | None = None
        if not torch.jit.is_scripting() and torch.compiler.is_compiling():
            # A branch on a random number would break the graph; both results are cheap next to a convolution.
            active = draw < self.prob
        elif float(draw) >= self.prob:  # 1
            return x
        x = plain_tensor(x)
        mean, std = feature_statistics(x, self.eps)  # 2, 3
        means, stds = mean, std
        if together:
            means, stds = self._gather(mean, std)
        gamma_mean, gamma_std = self._gammas()
        spread_mean = self._spread(means, gamma_mean)  # 4, 6
        spread_std = self._spread(stds, gamma_std)  # 5, 7
        noise_mean, noise_std = torch.randn_like(mean), torch.randn_like(std)
        out = perturb_features(x, mean, std, spread_mean, spread_std, noise_mean, noise_std)  # 8 to 10
        sampled = (std + noise_std * spread_std).detach()
        self._accumulate(means.detach().mean(dim=0), stds.detach().mean(dim=0), sampled, active)  # 11, 12
        return out if active is None else torch.where(active, out, x)  # 13

    def _check(self, x: Tensor) -> None:
        if x.dim() < 3 or x.shape[1] != self.num_channels:
            raise ValueError(
                f"FFA layer {self.stage}: expected features of shape (B, {self.num_channels}, *spatial), "
                f"got {list(x.shape)}"
            )
        if not torch.jit.is_scripting():
            self._warn(x)

    @torch.jit.unused
    def _warn(self, x: Tensor) -> None:
        if torch.compiler.is_compiling() or self.variance == "random":
            return
        if len(x) == 1:
            if not several_processes():
                warn("FFA layers do nothing with a batch of one image, which has no variance over the batch")
        elif x.shape[2:].numel() < _FEW_POSITIONS:
            name, size = f" {self.stage}" if self.stage else "", " x ".join(map(str, x.shape[2:]))
            warn(
                f"FFA layer{name}: features of {size} positions have standard deviations that are "
                "mostly chance, and the layer's noise grows with them",
                hint="Larger images help, or no layer after the last stages: stages=[1, 2, 3], on the "
                "command line --set 'fedfa.stages=[1,2,3]'.",
            )

    @torch.jit.unused
    def _gather(self, mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
        both = _not_compiled(rows_of_all)(torch.cat([mean, std], dim=1))
        return both[:, : self.num_channels], both[:, self.num_channels :]

    def _draw(self, x: Tensor, together: bool) -> Tensor:
        """Draw the number that decides whether the layer is active, uniform in [0, 1)."""
        if not torch.jit.is_scripting():
            if together:
                return _not_compiled(drawn_together)(torch.rand((), device=x.device))
            if torch.compiler.is_compiling():
                return torch.rand((), device=x.device)
        return torch.rand(1)  # on the CPU, which does not wait for a GPU

    def _gammas(self) -> tuple[Tensor, Tensor]:
        if self.variance == "client":
            return torch.zeros_like(self.gamma_mean), torch.zeros_like(self.gamma_std)
        return self.gamma_mean, self.gamma_std

    def _spread(self, statistic: Tensor, gamma: Tensor) -> Tensor:
        """Return the standard deviation of the noise, (C,), from statistics of the images, (B, C)."""
        if self.variance == "random":  # FedFA-R: one deviation for all channels (FedFA+ section 5.1)
            return torch.full_like(statistic[0], 0.5)
        return augmentation_spread(statistic, gamma)

    def _accumulate(
        self, mean: Tensor, std: Tensor, sampled_std: Tensor, active: Tensor | None = None
    ) -> None:
        """Update running statistics (Eq. 5), given means over the batch (C,), and the counts."""
        share = torch.full_like(self.running_mean, 1.0 - self.momentum)
        count = torch.ones_like(self.num_active_batches)
        if active is not None:
            share, count = share * active, count * active
        self.running_mean.lerp_(mean.to(share.dtype), share)
        self.running_std.lerp_(std.to(share.dtype), share)
        self.num_active_batches.add_(count)
        self.sampled_std_count.add_(count * sampled_std.numel())
        self.negative_std_count.add_(count * (sampled_std < 0).sum())

    @torch.jit.unused
    def statistics(self) -> tuple[Tensor, Tensor]:
        """Return the running statistics of this round, for the server.

        Returns:
            `(mean, std)`, (C,) each, copies. With `bias_correction` and after t active batches they are
            `mean / (1 - momentum**t)` and `(std - momentum**t) / (1 - momentum**t)`; before the first active
            batch they are the start values 0 and 1.
        """
        mean, std = self.running_mean.clone(), self.running_std.clone()
        steps = int(self.num_active_batches)
        if not self.bias_correction or steps == 0:
            return mean, std
        start = self.momentum**steps
        # With deviations of zero the subtraction can leave a negative rounding error.
        return mean / (1.0 - start), ((std - start) / (1.0 - start)).clamp_min(0.0)

    @torch.jit.unused
    def set_gamma(self, gamma_mean: Tensor, gamma_std: Tensor) -> None:
        """Set the server's modulated variances over the statistics of all sites.

        Args:
            gamma_mean: modulated variance of the mean, (C,) (`medfedaug.functional.student_t_modulation`);
                with `variance="direct"` the variance itself (`medfedaug.functional.across_site_variance`).
            gamma_std: the same of the standard deviation, (C,).
        """
        self.gamma_mean.copy_(gamma_mean.view(self.num_channels))  # a number for each channel
        self.gamma_std.copy_(gamma_std.view(self.num_channels))

    @torch.jit.unused
    def start_round(self) -> None:
        """Begin a round: with `running="reset"`, set the running statistics to 0 and 1."""
        if self.running == "reset":
            self.running_mean.zero_()
            self.running_std.fill_(1.0)
            self.num_active_batches.zero_()

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "FFALayer":
        # `net.half()` must not round statistics: an average with weight 0.99 stands still in float16.
        names = ("running_mean", "running_std", "gamma_mean", "gamma_std")
        before = {name: getattr(self, name) for name in names}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, value in before.items():
            buffer = getattr(self, name)
            if buffer.dtype in (torch.float16, torch.bfloat16):
                setattr(self, name, value.to(buffer.device))
        return self

    def extra_repr(self) -> str:
        text = f"{self.num_channels}, prob={self.prob}, momentum={self.momentum}, eps={self.eps}"
        text += f", variance='{self.variance}', running='{self.running}'"
        if self.bias_correction:
            text += ", bias_correction=True"
        return f"{text}, stage='{self.stage}'" if self.stage else text


def several_processes() -> bool:
    """Return whether this process is one of several in the default group of `torch.distributed`."""
    return (
        distributed.is_available() and distributed.is_initialized() and int(distributed.get_world_size()) > 1
    )


@cache
def _not_compiled(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Leave a function out of compiled graphs; the import of the compiler waits until the first call."""
    uncompiled: Callable[[Tensor], Tensor] = torch.compiler.disable(function)
    return uncompiled


def rows_of_all(rows: Tensor) -> Tensor:
    """Return the rows of all processes in the order of their ranks; their numbers may differ.

    Gradients flow back to the process of a row, as with `torch.nn.SyncBatchNorm`: averaged over processes by
    `DistributedDataParallel`, they are the gradients of the mean of all losses.

    Rows are (B, N), the result is (sum of all B, N), the same in every process; the values keep their bits.
    """
    from torch.distributed.nn import functional

    rank, world = distributed.get_rank(), distributed.get_world_size()
    sizes = torch.zeros(world, dtype=torch.int64, device=rows.device)
    sizes[rank] = len(rows)
    distributed.all_reduce(sizes)
    # A sum with zeros for all other rows, since gathering needs equal numbers of rows.
    before, after = int(sizes[:rank].sum()), int(sizes[rank + 1 :].sum())
    padded: Tensor = functional.all_reduce(torch.nn.functional.pad(rows, (0, 0, before, after)))
    return padded


def drawn_together(value: Tensor) -> Tensor:
    """Return the random number of the first process in all processes."""
    distributed.broadcast(value, 0)
    return value
