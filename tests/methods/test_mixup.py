"""MixUp against Zhang et al., ICLR 2018."""

from __future__ import annotations

import pytest
from reference import UNEVEN, assert_steps, share_of
from torch.nn.functional import cross_entropy


@pytest.mark.parametrize("alpha", [0.2, 1.0])
def test_images_and_losses_of_two_are_mixed(federate, alpha):
    run = federate(
        "mixup",
        plan=UNEVEN,
        settings={"mixup": {"alpha": alpha}},
        network="reference_convolutional",
        local_epochs=2,
    )

    def step(network, x, y, draws):
        share, order = share_of(draws[0]), draws[1]
        out = network(share * x + (1 - share) * x[order])
        return share * cross_entropy(out, y) + (1 - share) * cross_entropy(out, y[order])

    assert_steps(run, step)
