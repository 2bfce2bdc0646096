"""α by layer: what the adapters said, and its picture."""

import pytest
import torch

from medfedaug.models import build_network, insert_instance_adapters, instance_adapters
from medfedaug.research.comparison import alpha_by_layer, interpolation_weights


def test_weights_are_what_the_adapters_said_for_each_image():
    torch.manual_seed(0)
    net = insert_instance_adapters(
        build_network("resnet18", in_channels=3, out_channels=2, widen_factor=0.25)
    )
    for index, adapter in enumerate(instance_adapters(net).values()):
        adapter.out_weight.data.normal_(0, 0.1)
        adapter.out_bias.data[1] = 0.04 * index
    images = torch.rand(5, 3, 32, 32)
    weights = interpolation_weights(net, images.split(2))
    assert list(weights) == list(instance_adapters(net))
    assert all(values.shape == (5,) for values in weights.values())
    # Without an influence of the image α is the bias alone.
    for adapter in instance_adapters(net).values():
        adapter.out_weight.data.zero_()
    for index, values in enumerate(interpolation_weights(net, [images]).values()):
        torch.testing.assert_close(values, torch.full((5,), 0.04 * index))
    first = next(iter(instance_adapters(net).values()))
    assert not first._forward_hooks

    figure = alpha_by_layer({"A": weights, "B": weights, "C": weights})
    assert [axes.get_title() for axes in figure.axes] == ["A", "B", "C"]
    line = figure.axes[0].lines[0]
    medians = [float(values.median()) for values in weights.values()]
    assert line.get_ydata() == pytest.approx(medians)
    assert list(line.get_xdata()) == list(range(1, 21))


def test_a_network_without_adapters_and_no_image_say_so():
    net = build_network("lenet5")
    with pytest.raises(ValueError, match="no instance adapters"):
        interpolation_weights(net, [])
    with pytest.raises(ValueError, match="no image"):
        interpolation_weights(insert_instance_adapters(net), [])
