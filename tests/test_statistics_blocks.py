"""Images that do not fit one block of the statistics pass."""

import numpy as np
import pytest
import torch

import medfedaug.statistics
from medfedaug.statistics import channel_statistics


@pytest.mark.parametrize("block", [1, 7, 64, 1000])
@pytest.mark.parametrize("layout", ["C", "F", "channels last"])
def test_blocks_of_any_size_give_the_statistics_of_the_whole(monkeypatch, block, layout):
    monkeypatch.setattr(medfedaug.statistics, "_BLOCK", max(block, 3))
    rng = np.random.default_rng(0)
    images = [rng.normal(1e4, 3.0, (3, 5, 4, n)).astype(np.float32) for n in (1, 6)]
    tensors = [torch.from_numpy(image.copy(order="F" if layout == "F" else "C")) for image in images]
    if layout == "channels last":
        tensors = [t.movedim(0, -1).contiguous().movedim(-1, 0) for t in tensors]
    before = [t.clone() for t in tensors]
    found = channel_statistics(tensors)
    wide = [image.astype(np.float64).reshape(3, -1) for image in images]
    np.testing.assert_allclose(found.mean, np.mean([w.mean(1) for w in wide], axis=0), rtol=1e-13)
    np.testing.assert_allclose(found.std, np.mean([w.std(1) for w in wide], axis=0), rtol=1e-9)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


def test_a_constant_stays_constant_across_blocks(monkeypatch):
    monkeypatch.setattr(medfedaug.statistics, "_BLOCK", 16)
    assert channel_statistics([torch.full((2, 9, 11), 0.1)]).std.tolist() == [0.0, 0.0]


def test_one_infinite_voxel_in_a_late_block_is_seen(monkeypatch):
    monkeypatch.setattr(medfedaug.statistics, "_BLOCK", 16)
    image = torch.rand(1, 9, 11)
    image[0, 8, 10] = torch.inf
    with pytest.raises(ValueError, match="not finite"):
        channel_statistics([image])
