"""MixStyle against Zhou et al., ICLR 2021."""

from __future__ import annotations

from reference import UNEVEN, assert_steps, share_of
from torch.nn.functional import cross_entropy


def test_features_take_on_a_share_of_another_images_style(federate):
    run = federate(
        "mixstyle",
        plan=UNEVEN,
        settings={"mixstyle": {"alpha": 0.5}},
        network="reference_convolutional",
        local_epochs=2,
    )
    active = []

    def step(network, x, y, draws):
        z = x
        for stage in network.encoder:
            z = stage(z)
            active.append(float(draws.pop(0)) < 0.5)
            if not active[-1]:
                continue
            share, order = share_of(draws.pop(0))[..., None, None], draws.pop(0)
            mean = z.mean((2, 3), keepdim=True)
            std = ((z - mean).square().mean((2, 3), keepdim=True) + 1e-6).sqrt().detach()
            mean = mean.detach()
            normal = (z - mean) / std
            z = normal * (share * std + (1 - share) * std[order]) + share * mean + (1 - share) * mean[order]
        return cross_entropy(network.head(z), y)

    assert_steps(run, step)
    assert {True, False} == set(active)
