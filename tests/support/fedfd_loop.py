"""FedFD's loss and layers, written out in float64."""

import torch
from torch.nn.functional import avg_pool2d, cross_entropy

SITES = ["site_A", "site_B", "site_C"]

STATISTICS = ("running_mean", "running_var")

L1, L2 = 0.3, 0.5


def layers(network):
    return [(f"encoder.{i}.1", stage[0], stage[1]) for i, stage in enumerate(network.encoder)]


def normalised(z, norm, mean_, std):
    """With statistics of each image, (B, C) or (C,)."""
    shape = (-1, z.shape[1], 1, 1)
    normal = (z - mean_.reshape(shape)) / std.reshape(shape)
    return normal * norm.weight.reshape(1, -1, 1, 1) + norm.bias.reshape(1, -1, 1, 1)


def own_statistics(z, norm):
    centred = z - z.mean((2, 3), keepdim=True)
    return z.mean((2, 3)), (centred.square().mean((2, 3)) + norm.eps).sqrt()


def interpolated_features(network, x, shared, mix):
    """The features with every norm's statistics between the image's own and the federation's."""
    z = x
    for name, convolution, norm in layers(network):
        z = convolution(z)
        own = own_statistics(z, norm)
        mean_g, var_g = (shared[f"{name}.{entry}"] for entry in STATISTICS)
        z = normalised(z, norm, *mix(name, own, (mean_g, (var_g + norm.eps).sqrt())))
        z = avg_pool2d(torch.tanh(z), 2)
    return z.mean((2, 3))


def features(network, x):
    return network.encoder(x).mean((2, 3))


def diversified_loss(network, x, y, shared, draws):
    """Eq. 2 to 5, the distance as a mean over the channels."""
    f = features(network, x)
    head = network.head[2]
    own = cross_entropy(head(f), y)
    if shared is None:
        return own

    def mix(_name, own, federation):
        u = draws.pop(0).double()
        return tuple(u * mine + (1 - u) * theirs for mine, theirs in zip(own, federation, strict=True))

    changed = interpolated_features(network, x, shared, mix)
    distance = (f - changed).square().sum(1).mean() / f.shape[1]
    return (1 - L1) * own + L1 * cross_entropy(head(changed), y) + L2 * distance
