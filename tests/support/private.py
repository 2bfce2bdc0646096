"""A real site that trains with DP-SGD, and one step of it as a sum of clipped gradients."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import torch
from torch import Tensor, nn

from medfedaug.config.run import RunConfig
from medfedaug.federation import FederationServer, Reply, Request, Site, SiteTrainer
from medfedaug.hospital.privacy import PrivacyPolicy
from medfedaug.hospital.privacy.guard import SitePrivacy


def private(**changes) -> PrivacyPolicy:
    """Next to no noise, unless a test says otherwise."""
    values = {"sgd_noise_multiplier": 1e-7, "sgd_clip": 0.05, "epsilon": 1e30, "min_images": 1}
    return PrivacyPolicy.from_dict({**values, **changes})


def dropping(in_channels: int = 3, out_channels: int = 2, **_) -> nn.Module:
    """Dropout before one fully connected layer, for images of 8 x 8 pixels."""
    return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(in_channels * 64, out_channels))


def smooth(in_channels: int = 1, out_channels: int = 2, spatial_dims: int = 2, **_) -> nn.Module:
    """Two convolutions with a group norm between them, for slices and volumes of any size."""
    convolution = nn.Conv3d if spatial_dims == 3 else nn.Conv2d
    first, last = convolution(in_channels, 4, 3, padding=1), convolution(4, out_channels, 1)
    return nn.Sequential(first, nn.GroupNorm(2, 4), nn.Tanh(), last)


NETWORKS = {"reference_dropping": dropping, "reference_smooth": smooth}


class PrivateSite:
    """A site that was prepared, and may be asked for one round after the other.

    Args:
        config: the run, of as many rounds as are asked for.
        root: holds the sites' folders.
        policy: the site's.
        name: of the site.
    """

    def __init__(
        self,
        config: RunConfig,
        root: Path,
        policy: PrivacyPolicy | None = None,
        name: str = "A",
        ledger: Path | None = None,
        **more,
    ) -> None:
        self.config, self.policy = config, policy or private()
        server = FederationServer(config)
        self.privacy = SitePrivacy(self.policy, ledger)
        self.site = Site(name, SiteTrainer(config, root, "cpu", privacy=self.privacy, **more))
        self.run = server.run
        self.prepared = self.site.answer(server.prepare())
        self.start = {key: value.clone() for key, value in server.state.items()}
        self.rounds = 0

    @property
    def trainer(self) -> SiteTrainer:
        return self.site.trainer

    @property
    def cases(self) -> int:
        return len(self.trainer.samples.training().stored)

    def silence(self, cases: Collection[int]) -> PrivateSite:
        """Let some cases never be drawn: the neighbour of the site as it is."""
        samples = self.trainer.samples.training()
        ranges = type(samples).ranges(samples)
        samples.ranges = lambda: [range(0) if i in cases else one for i, one in enumerate(ranges)]
        return self

    def ask(self, weights=None, should_stop=None) -> Reply:
        """The answer to the next round, whose model is always the first one unless another is given."""
        self.rounds += 1
        request = Request("train", self.rounds, weights=weights or self.start, run=self.run)
        return self.site.answer(request, should_stop)

    def step(self, weights=None) -> Tensor:
        """What one step of SGD with all cases added up, in units of C, float64."""
        reply = self.ask(weights)
        assert not reply.error, reply.error
        start = weights or self.start
        moved = torch.cat([(start[k].double() - v.double()).flatten() for k, v in reply.weights.items()])
        return moved / self.config.learning_rate * self.cases / self.policy.sgd_clip
