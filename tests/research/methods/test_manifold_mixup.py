"""Manifold MixUp against Verma et al., ICML 2019, Algorithm 1."""

from reference import UNEVEN, assert_steps, share_of
from torch.nn.functional import cross_entropy


def test_the_images_or_the_features_of_one_stage_are_mixed(federate):
    run = federate("manifold_mixup", plan=UNEVEN, local_epochs=2)
    places = set()

    def step(network, x, y, draws):
        share, order, place = share_of(draws[0]), draws[1], int(draws[2])
        places.add(place)

        def mixed(z, here):
            return share * z + (1 - share) * z[order] if here else z

        z = mixed(x, place == 2)
        for number, stage in enumerate(network.encoder):
            z = mixed(stage(z), place == number)
        out = network.head(z)
        return share * cross_entropy(out, y) + (1 - share) * cross_entropy(out, y[order])

    assert_steps(run, step)
    assert places == {0, 1, 2}
