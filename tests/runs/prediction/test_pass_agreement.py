from __future__ import annotations

import numpy as np
import pytest
import torch

from medfedaug.runs.prediction.pass_agreement import PassAgreement
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
