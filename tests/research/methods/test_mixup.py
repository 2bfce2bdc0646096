"""MixUp against Zhang et al., ICLR 2018."""

import pytest
import torch
from reference import SEGMENTING_OPTIONS, UNEVEN, assert_steps, share_of
from torch.nn.functional import cross_entropy


@pytest.mark.parametrize("dense", [False, True], ids=["photographs", "label maps"])
def test_images_and_losses_of_two_are_mixed(federate, make_regions, dense):
    options = {"local_epochs": 2}
    if dense:
        folders = [make_regions(name, number, 8) for name, number in zip("ABC", (3, 4, 5), strict=True)]
        options = {"folder": folders[0].parent, **SEGMENTING_OPTIONS}
    run = federate("mixup", plan=UNEVEN, settings={"mixup": {"alpha": 1.0 if dense else 0.2}}, **options)
    seen = {int(value) for batches in run.batches.values() for _, y in batches for value in y.unique()}
    assert seen == ({0, 1, 2} if dense else {0, 1})

    def step(network, x, y, draws):
        share, order, y = share_of(draws[0]), draws[1], y[:, 0].long() if dense else y
        out = network(share * x + (1 - share) * x[order])
        return share * cross_entropy(out, y) + (1 - share) * cross_entropy(out, y[order])

    assert_steps(run, step)


def test_mixup_draws_lambda_from_a_symmetric_beta():
    from medfedaug.research.methods.mixup import draw_lambda

    torch.manual_seed(0)
    drawn = torch.tensor([draw_lambda(0.4) for _ in range(4000)])
    # Beta(α, α): mean 1/2, variance 1/(4(2α + 1)).
    assert float(drawn.mean()) == pytest.approx(0.5, abs=0.02)
    assert float(drawn.var()) == pytest.approx(1 / (4 * 1.8), abs=0.01)
    assert draw_lambda(0.0) == 1.0
