"""FedRDN as a transform: the equation, the draw, and MONAI's conventions."""

import json

import numpy as np
import pytest
import torch
from monai.bundle import ConfigParser
from monai.data import MetaTensor
from monai.transforms import Compose, NormalizeIntensity, RandFlip

from medfedaug.statistics import ChannelStatistics, save_statistics
from medfedaug.transforms import FedRDN, FedRDND, FedRDNd, FedRDNDict

SITES = {
    "A": ChannelStatistics([0.1, 10.0], [0.5, 2.0], 10),
    "B": ChannelStatistics([0.3, 20.0], [0.7, 3.0], 20),
    "C": ChannelStatistics([-0.2, 30.0], [1.1, 5.0], 30),
}


def image(*spatial, dtype=torch.float32):
    values = torch.rand((2, *spatial), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (values * 100).to(dtype)


def normalized(x, site):
    """FedRDN Eq. 7 and 8, a channel at a time in float64."""
    pair = SITES[site]
    x = np.asarray(x).astype(np.float64)
    return np.stack([(x[c] - pair.mean[c].item()) / pair.std[c].item() for c in range(2)])


def drawn_site(out, x):
    close = [
        site for site in SITES if np.allclose(np.asarray(out), normalized(x, site), rtol=1e-5, atol=1e-5)
    ]
    assert len(close) == 1, "the result is not one site's normalisation"
    return close[0]


@pytest.mark.parametrize(("spatial", "site"), [((6,), "A"), ((6, 5), "B"), ((6, 5, 4), "C")])
def test_a_named_site_is_the_equation(spatial, site):
    x = image(*spatial)
    transform = FedRDN(SITES, site=site)
    for _ in range(3):
        np.testing.assert_allclose(transform(x).numpy(), normalized(x, site), rtol=1e-6, atol=1e-6)


def test_training_draws_whole_pairs_uniformly():
    x = image(4, 4)
    transform = FedRDN(SITES).set_random_state(0)
    sites = [drawn_site(transform(x), x) for _ in range(600)]
    counts = [sites.count(site) for site in SITES]
    assert sum(counts) == 600
    # Four standard deviations of a binomial with p = 1/3 about 200.
    assert max(abs(count - 200) for count in counts) < 4 * (600 * 2 / 9) ** 0.5


def test_same_seed_same_draws():
    x = image(4, 4)
    first, second = (FedRDN(SITES).set_random_state(5) for _ in range(2))
    a = [drawn_site(first(x), x) for _ in range(20)]
    assert a == [drawn_site(second(x), x) for _ in range(20)]
    first.set_random_state(5)
    assert a == [drawn_site(first(x), x) for _ in range(20)]
    state = np.random.RandomState(5)
    assert a == [drawn_site(FedRDN(SITES).set_random_state(state=state)(x), x) for _ in range(20)]
    assert a != [drawn_site(FedRDN(SITES).set_random_state(6 + i)(x), x) for i in range(20)]


@pytest.mark.parametrize(
    "form",
    [
        SITES,
        {site: s.to_dict() for site, s in SITES.items()},
        {site: {"mean": s.mean.tolist(), "std": s.std.tolist()} for site, s in SITES.items()},
        {site: [s.mean.tolist(), s.std.tolist()] for site, s in SITES.items()},
    ],
)
def test_forms_of_statistics(form):
    x = image(4, 4)
    transform = FedRDN(form, site="C")
    assert transform.sites == ("A", "B", "C")
    assert drawn_site(transform(x), x) == "C"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"statistics": SITES, "site": "D"}, "site 'D': known are A, B, C"),
        ({"statistics": SITES, "site": "A", "average": True}, "without average"),
        ({"statistics": {"A": [[0.0], [0.0]]}}, "site 'A': standard deviation of channel 0"),
        ({"statistics": {"A": {"mean": [0.0]}}}, "site 'A': lacks std"),
        ({"statistics": {"A": [[0.0], [1.0, 1.0]]}}, "site 'A': .*\\[1\\] and \\[2\\]"),
        ({"statistics": {"A": [[0.0], [1.0]], "B": [[0.0] * 3, [1.0] * 3]}}, "'B' has 3 channels"),
        ({"statistics": SITES, "dtype": np.int16}, "floating point type"),
    ],
)
def test_impossible_arguments(args, message):
    with pytest.raises(ValueError, match=message):
        FedRDNd("image", **args)


@pytest.mark.parametrize(
    ("kind", "dtype"), [("numpy", "uint16"), ("numpy", "float16"), ("torch", "uint8"), ("meta", "float64")]
)
def test_types_in_and_out_and_no_mutation(kind, dtype):
    array = image(5, 4).numpy().astype(dtype)
    x = {"numpy": lambda a: a, "torch": torch.from_numpy, "meta": MetaTensor}[kind](array.copy())
    out = FedRDN(SITES, site="B")(x)
    assert isinstance(out, MetaTensor)
    assert out.dtype == torch.float32
    np.testing.assert_allclose(out.numpy(), normalized(array, "B"), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(np.asarray(x), array)


@pytest.mark.parametrize(
    ("arguments", "dtype", "expected"),
    [
        (torch.float32, np.float64, torch.float64),
        (torch.float64, None, torch.float64),
        (torch.float16, None, torch.float16),
        (torch.int16, None, torch.float32),
        (torch.float32, torch.float16, torch.float16),
        (torch.float32, "float16", torch.float16),
    ],
)
def test_output_dtype(arguments, dtype, expected):
    x = image(4, 4, dtype=arguments)
    out = FedRDN(SITES, site="A", dtype=dtype)(x)
    assert out.dtype == expected
    np.testing.assert_allclose(out.double().numpy(), normalized(x, "A"), rtol=2e-3, atol=2e-3)


def test_metadata_is_kept():
    affine = torch.diag(torch.tensor([2.0, 3.0, 4.0, 1.0], dtype=torch.float64))
    x = MetaTensor(image(5, 4, 3), affine=affine, meta={"filename_or_obj": "a.nii.gz"})
    x = RandFlip(prob=1.0, spatial_axis=0)(x)
    out = FedRDN(SITES)(x)
    reference = NormalizeIntensity(subtrahend=[0.3, 20.0], divisor=[0.7, 3.0], channel_wise=True)(x.clone())
    assert type(out) is MetaTensor
    assert out.meta["filename_or_obj"] == "a.nii.gz"
    assert torch.equal(out.affine, reference.affine)
    assert out.applied_operations == reference.applied_operations == x.applied_operations
    assert len(out.applied_operations) == 1
    out.meta["filename_or_obj"] = "changed"
    assert x.meta["filename_or_obj"] == "a.nii.gz"


def test_dictionary_shares_one_draw_between_keys():
    assert FedRDND is FedRDNDict is FedRDNd
    x, y = image(4, 4), image(6, 3)
    transform = FedRDNd(["t1", "t2"], SITES).set_random_state(0)
    seen = set()
    for _ in range(30):
        data = {"t1": x, "t2": y, "label": "kept"}
        out = transform(data)
        site = drawn_site(out["t1"], x)
        assert drawn_site(out["t2"], y) == site
        assert out["label"] == "kept"
        assert data["t1"] is x
        seen.add(site)
    assert seen == set(SITES)


def test_dictionary_draws_like_the_array_version_and_forwards_its_state():
    x = image(4, 4)
    array = FedRDN(SITES).set_random_state(3)
    dictionary = FedRDNd("image", SITES)
    assert dictionary.set_random_state(3) is dictionary
    for _ in range(20):
        assert torch.equal(array(x), dictionary({"image": x})["image"])
    pipelines = [Compose([FedRDNd("image", SITES)]).set_random_state(1) for _ in range(2)]
    for _ in range(10):
        assert torch.equal(*(p({"image": x})["image"] for p in pipelines))


def test_bundle_configuration(tmp_path):
    save_statistics(tmp_path / "statistics.json", SITES)
    x = image(4, 4)
    for statistics in ({k: s.to_dict() for k, s in SITES.items()}, str(tmp_path / "statistics.json")):
        transform = {"_target_": "medfedaug.transforms.FedRDNd", "keys": "image", "statistics": statistics}
        config = {"preprocessing": {"_target_": "Compose", "transforms": [{**transform, "site": "C"}]}}
        parser = ConfigParser(json.loads(json.dumps(config)))
        pipeline = parser.get_parsed_content("preprocessing")
        assert drawn_site(pipeline({"image": x})["image"], x) == "C"


def test_a_channel_that_is_constant_at_a_site():
    """Its pair is the others' average where it is drawn, and its own mean where it is the own site's."""
    sites = {"A": [[1.0, 2.0], [0.5, 0.25]], "B": [[3.0, 0.0], [1.5, 0.0]], "C": [[5.0, 6.0], [1.0, 0.75]]}
    x = torch.rand(2, 4, 5)
    drawn = FedRDN(sites)
    drawn._index = 1
    torch.testing.assert_close(
        drawn(x, randomize=False), torch.stack([(x[0] - 3.0) / 1.5, (x[1] - 4.0) / 0.5])
    )
    laser = torch.stack([x[0], torch.zeros(4, 5)])
    for transform in (FedRDN(sites, site="B"), FedRDN({"B": sites["B"]}, site="B")):
        out = transform(laser)
        torch.testing.assert_close(out[0], (x[0] - 3.0) / 1.5)
        assert bool((out[1] == 0).all())
    averaged = FedRDN(sites, average=True)(x)
    torch.testing.assert_close(averaged[1], (x[1] - 4.0) / 0.5)
