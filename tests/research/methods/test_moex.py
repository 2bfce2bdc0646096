"""MOEX against Li et al., CVPR 2021, Eq. 1 to 3."""

from reference import UNEVEN, assert_steps
from torch.nn.functional import cross_entropy


def test_features_take_on_the_moments_of_another_image(federate):
    run = federate("moex", plan=UNEVEN, settings={"moex": {"weight": 0.8}}, local_epochs=2)
    active = []

    def step(network, x, y, draws):
        z = network.encoder[0](x)
        active.append(float(draws[0]) < 0.5)
        if active[-1]:
            order = draws[1]
            mean = z.mean(1, keepdim=True)
            std = ((z - mean).square().mean(1, keepdim=True) + 1e-5).sqrt()
            z = (z - mean) / std * std[order] + mean[order]
        out = network.head(network.encoder[1](z))
        if not active[-1]:
            return cross_entropy(out, y)
        return 0.8 * cross_entropy(out, y) + 0.2 * cross_entropy(out, y[draws[1]])

    assert_steps(run, step)
    assert {True, False} == set(active)
