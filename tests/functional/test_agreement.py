from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch

from medfedaug.functional.agreement import specific_agreement


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
