from itertools import combinations

import numpy as np
import pytest
import torch

from medfedaug.runs.prediction.pass_agreement import PassAgreement, specific_agreement
from medfedaug.tasks import Prediction


@pytest.mark.parametrize("classes", [2, 300])
def test_deviation_and_sizes_are_those_of_all_passes(classes):
    random = np.random.default_rng(0)
    shares = random.dirichlet(np.ones(classes), (5, 3, 4, 2)).transpose(0, 4, 1, 2, 3).astype(np.float32)
    labels = shares.argmax(axis=1)
    passes = PassAgreement(classes, mapped=True)
    for label, share in zip(labels, shares, strict=True):
        passes.add(Prediction(torch.from_numpy(label[None]), torch.from_numpy(share)))
    assert passes.count == 5
    expected = shares.astype(float).std(axis=0).max(axis=0)
    np.testing.assert_allclose(passes.deviation().numpy(), expected, atol=1e-6)
    counts = np.array([np.bincount(label.ravel(), minlength=classes)[1:] for label in labels])
    np.testing.assert_array_equal(passes.voxels().numpy(), [counts.min(axis=0), counts.max(axis=0)])
    assert passes.agreement().shape == (classes - 1,)


def test_the_deviation_is_0_where_all_agree_and_one_half_where_they_are_sure_of_the_opposite():
    passes = PassAgreement(2, mapped=True)
    for second in (0.0, 1.0):
        shares = torch.tensor([[0.0, 1 - second], [1.0, second]]).view(2, 2, 1, 1)
        passes.add(Prediction(shares.argmax(dim=0, keepdim=True), shares))
    assert passes.deviation().flatten().tolist() == [0.0, 0.5]


@pytest.mark.parametrize("shape", [(7, 5), (4, 5, 6)])
def test_agreement_is_the_dice_of_all_pairs_with_their_sums_pooled(shape):
    labels = np.random.default_rng(0).integers(0, 3, (4, *shape))
    labels[labels == 2] = 0  # a class that is nowhere
    labels[3] = 0  # and a label map without any
    both = sum(((a == 1) & (b == 1)).sum() for a, b in combinations(labels, 2))
    sizes = sum((a == 1).sum() + (b == 1).sum() for a, b in combinations(labels, 2))
    agreement = specific_agreement(torch.from_numpy(labels), 3)
    assert agreement[0].item() == pytest.approx(2 * both / sizes, abs=1e-12)
    assert 0 < agreement[0] < 1
    assert torch.isnan(agreement[1])


def test_label_maps_that_are_the_same_agree_and_small_integers_do_not_overflow():
    labels = torch.ones(2, 300, 300, dtype=torch.uint8).expand(2, 300, 300)
    assert specific_agreement(torch.cat([labels] * 100), 2).item() == 1
