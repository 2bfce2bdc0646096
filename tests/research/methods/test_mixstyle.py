"""MixStyle against Zhou et al., ICLR 2021."""

from reference import UNEVEN, assert_steps, share_of
from torch.nn.functional import cross_entropy, mse_loss


def mixed(z, share, order):
    """Each image with a share of another's statistics."""
    mean = z.mean((2, 3), keepdim=True)
    std = ((z - mean).square().mean((2, 3), keepdim=True) + 1e-6).sqrt().detach()
    mean, share = mean.detach(), share[..., None, None]
    normal = (z - mean) / std
    return normal * (share * std + (1 - share) * std[order]) + share * mean + (1 - share) * mean[order]


def test_features_take_on_a_share_of_another_images_style(federate):
    run = federate("mixstyle", plan=UNEVEN, settings={"mixstyle": {"alpha": 0.5}}, local_epochs=2)
    active = []

    def step(network, x, y, draws):
        z = x
        for stage in network.encoder:
            z = stage(z)
            active.append(float(draws.pop(0)) < 0.5)
            if not active[-1]:
                continue
            z = mixed(z, share_of(draws.pop(0)), draws.pop(0))
        return cross_entropy(network.head(z), y)

    assert_steps(run, step)
    assert {True, False} == set(active)


def test_styles_are_mixed_in_a_second_pass_for_the_loss_of_fedfd(federate):
    weights = {"lambda1": 0.3, "lambda2": 0.5}
    settings = {"mixstyle": {"alpha": 0.5, "prob": 1.0, **weights}}
    run = federate("mixstyle", plan=UNEVEN, settings=settings)

    def step(network, x, y, draws):
        plain = network.encoder(x).mean((2, 3))
        while draws[0].dim() == 0:  # of the layers in the first pass, which are not active
            draws.pop(0)
        z = x
        for number, stage in enumerate(network.encoder):
            if number:
                draws.pop(0)
            z = mixed(stage(z), share_of(draws.pop(0)), draws.pop(0))
        changed, head = z.mean((2, 3)), network.head[2]
        both = 0.7 * cross_entropy(head(plain), y) + 0.3 * cross_entropy(head(changed), y)
        return both + 0.5 * mse_loss(plain, changed)

    assert_steps(run, step)
