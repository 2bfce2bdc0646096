"""Channel statistics against NumPy, and the JSON file against what could be in it."""

import copy
import json
import pickle

import numpy as np
import pytest
import torch
from monai.data import MetaTensor

from medfedaug.data.preparation.preparation import resize_in_plane
from medfedaug.statistics import (
    ChannelStatistics,
    channel_statistics,
    load_statistics,
    save_statistics,
    usable_pairs,
)

PAIR = {"mean": [0.5], "std": [0.25], "count": 12}


def reference(images):
    """FedRDN Eq. 5 (as the mean it is in the text) and Eq. 6, in plain NumPy."""
    means = [[channel.astype(np.float64).mean() for channel in image] for image in images]
    stds = [[channel.astype(np.float64).std() for channel in image] for image in images]
    return np.mean(means, axis=0), np.mean(stds, axis=0)


@pytest.mark.parametrize(
    "dtype", ["float32", "float64", "uint8", "int16", "uint16", ">i2", ">f4", "float16", "bool"]
)
def test_statistics_equal_numpy(dtype):
    rng = np.random.default_rng(0)
    images = [(rng.random((2, *shape)) * 200).astype(dtype) for shape in ((5, 7), (9, 4), (6, 6))]
    if dtype == "bool":
        images = [rng.random((2, 5, 7)) > 0.5 for _ in range(3)]
    result = channel_statistics(images)
    mean, std = reference(images)
    assert result.count == 3
    assert result.mean.dtype == result.std.dtype == torch.float64
    np.testing.assert_allclose(result.mean.numpy(), mean, rtol=1e-12)
    np.testing.assert_allclose(result.std.numpy(), std, rtol=1e-12)


def test_precision_survives_a_large_offset():
    images = [np.random.default_rng(i).normal(1e6, 1.0, (1, 8, 8, 8)).astype(np.float32) for i in range(3)]
    np.testing.assert_allclose(channel_statistics(images).std.numpy(), reference(images)[1], rtol=1e-9)


def test_tensors_and_metatensors_are_read_and_left_alone():
    array = np.random.default_rng(0).random((2, 4, 5, 3)).astype(np.float32)
    expected = channel_statistics([array])
    for image in (torch.from_numpy(array.copy()), MetaTensor(array.copy()), torch.from_numpy(array).double()):
        before = image.clone()
        assert channel_statistics([image]) == expected
        assert torch.equal(image, before)
    read_only = array.copy()
    read_only.flags.writeable = False
    assert channel_statistics([read_only]) == expected
    assert type(channel_statistics([MetaTensor(array)]).mean) is torch.Tensor


@pytest.mark.parametrize(
    ("images", "message"),
    [
        ([], "no image"),
        ([np.ones((1, 4)), np.ones((2, 4))], "image 1 has 2 channels, the images before it 1"),
        ([np.ones((1, 4)), np.array([[1.0, np.nan]])], "image 1 has voxels that are not finite"),
        ([np.array([[1.0, np.inf]])], "image 0 has voxels that are not finite"),
        ([np.array([[np.inf, -np.inf]])], "image 0 has voxels that are not finite"),
        ([np.ones(4)], r"image 0: expected shape \(C, \*spatial\), got \[4\]"),
        ([np.ones((1, 0))], r"image 0: expected shape \(C, \*spatial\), got \[1, 0\]"),
    ],
)
def test_impossible_images(images, message):
    with pytest.raises(ValueError, match=message):
        channel_statistics(images)


@pytest.mark.parametrize("value", [0.0, 0.1, 3.0, -1234.567])
def test_a_constant_channel_is_zero_and_a_constant_image_is_refused_by_name(value):
    image = np.random.default_rng(0).random((2, 7, 11))
    image[1] = value
    result = channel_statistics([image, image])
    assert result.std[1] == 0
    assert result.validate("DU").constant == (1,)
    with pytest.raises(ValueError, match=r"site 'DU': standard deviation of channel 0 is 0\.0"):
        channel_statistics([image[1:], image[1:]]).validate("DU")


def test_rounding_is_no_deviation():
    """A constant channel that was resized is constant; one in other units than its neighbour is not."""
    image = torch.rand(2, 120, 77) * 1e-6
    image[1] = 0.7321
    assert channel_statistics([resize_in_plane(image, 48)]).constant == (1,)
    image[1] = torch.rand(120, 77) * 3000
    assert channel_statistics([resize_in_plane(image, 48)]).constant == ()


SITES = {
    "A": ChannelStatistics([1.0, 2.0, 5.0], [0.5, 0.25, 0.0], 4),
    "B": ChannelStatistics([2.0, 0.0, 7.0], [1.5, 0.0, 0.0], 5),
    "C": ChannelStatistics([3.0, 4.0, 7.0], [2.5, 0.75, 0.0], 6),
}


def test_pairs_of_constant_channels_are_those_of_an_average_site():
    """Channel 1 varies at A and C, channel 2 nowhere: it gets the largest deviation of each site."""
    pairs = usable_pairs(SITES)
    expected = {
        "A": ([1.0, 2.0, 5.0], [0.5, 0.25, 0.5]),
        "B": ([2.0, 3.0, 7.0], [1.5, 0.5, 1.5]),
        "C": ([3.0, 4.0, 7.0], [2.5, 0.75, 2.5]),
    }
    assert {site: (p.mean.tolist(), p.std.tolist()) for site, p in pairs.items()} == expected
    assert [pair.count for pair in pairs.values()] == [4, 5, 6]
    assert usable_pairs(pairs) == pairs
    assert SITES["B"].std[1] == 0


def test_pairs_without_a_constant_channel_stay_to_the_bit():
    sites = {"A": ChannelStatistics([1 / 3], [1 / 7], 3), "B": ChannelStatistics([2 / 3], [3 / 7], 3)}
    assert usable_pairs(sites) == usable_pairs(sites, own=sites["A"]) == sites


@pytest.mark.parametrize(
    "mean", [[1.0, 2.0], (1, 2), np.array([1, 2], dtype=np.float32), torch.tensor([1.0, 2.0]), range(1, 3)]
)
def test_anything_array_like(mean):
    made = ChannelStatistics(mean, [3.0, 4.0], 5)
    assert made == ChannelStatistics([1.0, 2.0], [3.0, 4.0], 5)
    assert made.num_channels == 2
    assert made != ChannelStatistics([1.0, 2.0], [3.0, 4.0], 6)
    assert made != ChannelStatistics([1.0, 2.5], [3.0, 4.0], 5)
    assert copy.deepcopy(made) == pickle.loads(pickle.dumps(made)) == made


@pytest.mark.parametrize(
    ("mean", "std", "message"),
    [
        ([1.0], [1.0, 2.0], r"one shape \(C,\), got \[1\] and \[2\]"),
        ([[1.0]], [[1.0]], r"one shape \(C,\)"),
        ([], [], r"one shape \(C,\)"),
    ],
)
def test_impossible_shapes(mean, std, message):
    with pytest.raises(ValueError, match=message):
        ChannelStatistics(mean, std, 1).validate()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"mean": [0.0, np.nan]}, "mean of channel 1 is nan"),
        ({"mean": [-np.inf, 0.0]}, "mean of channel 0 is -inf"),
        ({"mean": [0.0, 1e30]}, "mean of channel 1 is 1e[+]30"),
        ({"std": [0.0, 0.0]}, "deviation of channel 0 is 0.0"),
        ({"std": [-1.0, 1.0]}, "deviation of channel 0 is -1.0"),
        ({"std": [1.0, np.nan]}, "deviation of channel 1 is nan"),
        ({"std": [np.inf, 1.0]}, "deviation of channel 0 is inf"),
        ({"std": [1e-300, 1.0]}, "deviation of channel 0 is 1e-300"),
        ({"count": 0}, "count is 0"),
    ],
)
def test_validation_names_site_and_channel(values, message):
    good = {"mean": [0.0, 0.0], "std": [1.0, 1.0], "count": 3}
    ChannelStatistics(**good).validate("BMC")
    with pytest.raises(ValueError, match=f"^site 'BMC': .*{message}"):
        ChannelStatistics(**{**good, **values}).validate("BMC")


def test_round_trip_is_exact(tmp_path):
    rng = np.random.default_rng(0)
    sites = {
        "DU": ChannelStatistics(rng.random(3) / 3, rng.random(3) * 1e-7, 12),
        "Zürich": ChannelStatistics([-1e15, 1 / 3, 5e-324], [1e-15, 1e15, 0.1], 10**12),
    }
    path = tmp_path / "statistics.json"
    save_statistics(path, sites)
    loaded = load_statistics(str(path))
    assert loaded == sites
    assert list(loaded) == list(sites)
    assert [p.name for p in tmp_path.iterdir()] == ["statistics.json"]
    content = json.loads(path.read_text(encoding="utf-8"))
    assert content["format"] == "medfedaug.statistics"
    assert content["version"] == 1
    assert content["sites"]["DU"] == sites["DU"].to_dict()


@pytest.mark.parametrize(
    ("sites", "message"),
    [
        ({}, "no site"),
        (
            {"A": ChannelStatistics([0.0], [1.0], 1), "B": ChannelStatistics([0.0] * 3, [1.0] * 3, 1)},
            "site 'B' has 3 channels, site 'A' has 1",
        ),
    ],
)
def test_save_refuses(tmp_path, sites, message):
    with pytest.raises(ValueError, match=message):
        save_statistics(tmp_path / "statistics.json", sites)
    assert not list(tmp_path.iterdir())


def file_with(sites, **other):
    return json.dumps({"format": "medfedaug.statistics", "version": 1, "sites": sites, **other})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Expecting value"),
        ("{", "Expecting"),
        ("[1, 2]", "not a statistics file"),
        ("[" * 100_000, ""),
        (file_with({"DU": PAIR}, format="other"), "not a statistics file"),
        (file_with({"DU": PAIR}, version=2), "not a statistics file of this release"),
        (file_with([PAIR]), "sites is .* expected an object"),
        (file_with({}), "no site"),
        (file_with({"DU": [[0.5], [0.25]]}), "sites.DU is .* expected an object"),
        (file_with({"DU": {"mean": [0.5], "std": [0.25]}}), "sites.DU is .* expected an object with count"),
        (file_with({"DU": {**PAIR, "mean": 0.5}}), "sites.DU.mean is 0.5, expected a list"),
        (file_with({"DU": {**PAIR, "mean": [None]}}), r"sites.DU.mean\[0\] is None, expected"),
        (file_with({"DU": {**PAIR, "mean": [10**400]}}), r"sites.DU.mean\[0\] is a huge number"),
        (file_with({"DU": {**PAIR, "mean": [0.5, 0.5]}}), r"site 'DU': .*\[2\] and \[1\]"),
        (file_with({"DU": {**PAIR, "std": [-0.1]}}), "site 'DU': standard deviation of channel 0 is -0.1"),
        (file_with({"DU": PAIR}).replace("0.25", "1e400"), r"sites.DU.std\[0\] is inf"),
        (file_with({"DU": {**PAIR, "count": "12"}}), "sites.DU.count is '12'"),
        (
            file_with({"DU": PAIR, "CU": {"mean": [0, 0], "std": [1, 1], "count": 1}}),
            "site 'CU' has 2 channels",
        ),
        (file_with({"DU": PAIR}).replace('{"DU"', '{"DU": {}, "DU"'), "'DU' occurs twice"),
    ],
)
def test_load_refuses_and_names_the_file(tmp_path, text, message):
    path = tmp_path / "statistics.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=f"(?s)statistics.json: .*{message}"):
        load_statistics(path)
