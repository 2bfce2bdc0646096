import itertools

import torch

from medfedaug.functional.means import WeightedMean


def mean_of(models, weights, order):
    mean = WeightedMean()
    for index in order:
        mean.add({"w": models[index]}, weights[index])
    return mean.result()["w"]


def test_equals_the_mean_written_out():
    models = [torch.tensor([[1.0, -2.0]]), torch.tensor([[4.0, 0.0]]), torch.tensor([[-1.0, 8.0]])]
    weights = [10, 30, 60]
    expected = (10 * models[0] + 30 * models[1] + 60 * models[2]) / 100
    torch.testing.assert_close(mean_of(models, weights, range(3)), expected)


def test_the_order_of_arrival_does_not_show_in_a_single_bit():
    generator = torch.Generator().manual_seed(0)
    # Magnitudes far apart, so that a plain sum does depend on the order.
    models = [torch.randn(5000, generator=generator) * 10.0 ** (4 * k - 8) for k in range(5)]
    models.append(-models[4] * (1 + 1e-7))
    weights = [3, 141, 59, 26, 535, 535]
    orders = list(itertools.permutations(range(6)))[::31]
    first = mean_of(models, weights, orders[0])
    assert all(torch.equal(first, mean_of(models, weights, order)) for order in orders)
    float32 = [sum((w * models[i] for i, w in ((i, weights[i]) for i in o))) / sum(weights) for o in orders]
    assert not all(torch.equal(float32[0], other) for other in float32)
