import torch
from torch import nn

from medfedaug.runs.prediction.predictor import FlippedNetwork, flips_of


def test_all_flips_but_none():
    assert flips_of(()) == []
    assert len(flips_of((0, 1, 2))) == len({*flips_of((0, 1, 2))}) == 7


def test_the_output_lies_as_the_image_does():
    """A convolution that looks to one side sees the other one, in 2D and in 3D."""
    for kind, dims in ((nn.Conv2d, 2), (nn.Conv3d, 3)):
        network = kind(1, 1, 3, padding=1, bias=False)
        nn.init.zeros_(network.weight)
        network.weight.data[(0, 0, 0, *[1] * (dims - 1))] = 1  # takes the voxel before, along the first axis
        x = torch.rand(2, 1, *[4] * dims)
        before, after = network(x), FlippedNetwork(network, (0,))(x)
        torch.testing.assert_close(before[:, :, 1:], x[:, :, :-1])
        torch.testing.assert_close(after[:, :, :-1], x[:, :, 1:])
        torch.testing.assert_close(FlippedNetwork(network, (1,))(x), before)


def test_of_several_outputs_the_first_is_flipped_back():
    class Two(nn.Module):
        def forward(self, x):
            return [x, x.sum()]

    x = torch.rand(1, 1, 3, 3)
    torch.testing.assert_close(FlippedNetwork(Two(), (0, 1))(x), x)
