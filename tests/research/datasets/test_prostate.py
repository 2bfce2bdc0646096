"""Benchmarks of volumes in their published layouts, and the real ones where they are at hand."""

import numpy as np
import pytest
from benchmark_files import PROSTATE, counts, write_lgg, write_prostate, write_retina

from medfedaug.data.sites import check_federation
from medfedaug.errors import DataError
from medfedaug.research.datasets.benchmarks import open_benchmark


def window(volume: np.ndarray) -> np.ndarray:
    """The papers' intensities: clipped at the 99 % quantile, 0 to 255, fractions cut off."""
    high, low = np.quantile(volume, 0.99), volume.min()
    return np.floor((np.minimum(volume, high) - low) / (high - low) * 255)


def test_prostate_mri_is_split_by_patient_and_has_three_slices(tmp_path):
    import nibabel

    write_prostate(tmp_path)
    sites = open_benchmark("prostate_mri", tmp_path)
    assert counts(sites) == dict.fromkeys(PROSTATE, (3, 1, 1))
    assert check_federation(sites) == ("segmentation", 3, ("background", "prostate"))
    site = sites[3]
    case = site.cases["training"][0]
    image, label = site.load_case(case)
    expected = window(np.asarray(nibabel.load(case.image).dataobj))
    assert image.shape == (3, 16, 16, 6)
    np.testing.assert_array_equal(image[1], expected)
    np.testing.assert_array_equal(image[0, ..., 1:], expected[..., :-1])
    np.testing.assert_array_equal(image[2, ..., :-1], expected[..., 1:])
    np.testing.assert_array_equal(image[0, ..., 0], expected[..., 0])
    assert (image.min(), image.max()) == (0, 255)
    assert label.unique().tolist() == [0, 1]
    scaled, _ = site.load_case(case, "scale")
    np.testing.assert_allclose(scaled, image / 255)
    single = open_benchmark("prostate_mri", tmp_path, neighbours=False)
    assert check_federation(single)[1] == 1
    np.testing.assert_array_equal(single[3].load_image(case)[0], expected)


def test_prostate_mri_in_the_published_order_of_slices(tmp_path):
    number = write_prostate(tmp_path, patients=20, published=True)
    sites = open_benchmark("prostate_mri", tmp_path, split="published")
    assert [site.name for site in sites] == list(PROSTATE)
    assert counts(sites) == dict.fromkeys(PROSTATE, (48, 16, 16))
    site = sites[3]
    order = np.load(tmp_path / "ISBI_1.5-index.npy").tolist()
    slices = [(f"Case{2 * p:02d}", z) for p in range(20) for z in (1, 2, 3, 4)]
    listed = [case for split in site.cases.values() for case in split]
    assert [case.name for case in listed] == ["{}/{}".format(*slices[i]) for i in order]
    image, label = site.load_case(listed[5])
    volume = open_benchmark("prostate_mri", tmp_path)[3]
    patient = next(
        c for split in volume.cases.values() for c in split if c.name == listed[5].name.split("/")[0]
    )
    whole, whole_label = volume.load_case(patient)
    index = listed[5].index
    np.testing.assert_array_equal(image, whole[..., index : index + 1])
    np.testing.assert_array_equal(label, whole_label[..., index : index + 1])
    assert check_federation(sites) == ("segmentation", 3, ("background", "prostate"))
    # FedFA's code keeps at least 32 slices, and so the numbers of FedFA+ Table 4.
    mini = open_benchmark("prostate_mri", tmp_path, split="published", fraction=1 / 6)
    assert counts(mini) == dict.fromkeys(PROSTATE, (32, 16, 16))
    assert mini[3].cases["training"] == site.cases["training"][:32]
    assert counts(open_benchmark("prostate_mri", tmp_path, fraction=1 / 6)) == dict.fromkeys(
        PROSTATE, (2, 4, 4)
    )
    np.save(tmp_path / "UCL-index.npy", np.arange(number - 1))
    with pytest.raises(DataError, match=r"site UCL, .*UCL-index\.npy: is a permutation of 79 .* have 80"):
        open_benchmark("prostate_mri", tmp_path, split="published")
    (tmp_path / "UCL-index.npy").unlink()
    with pytest.raises(DataError, match=r"UCL-index\.npy: is missing.*github\.com/med-air/HarmoFL"):
        open_benchmark("prostate_mri", tmp_path, split="published")


def test_lgg_as_published_slices(tmp_path):
    write_lgg(tmp_path)
    sites = open_benchmark("lgg_multisite", tmp_path)
    assert counts(sites) == {"CS": (3, 1, 1), "DU": (6, 2, 2), "EZ": (0, 0, 1)}
    assert check_federation(sites) == ("segmentation", 1, ("background", "FLAIR abnormality"))
    image, label = sites[1].load_case(sites[1].cases["training"][0])
    assert image.shape == label.shape == (1, 32, 32, 11)
    assert image[0, 5, 5].tolist() == list(range(1, 12))  # by number, not by name
    assert label.sum(dim=(0, 1, 2)).tolist() == [0] * 9 + [15, 15]
    folder = sites[0].cases["test"][0].image
    next(folder.glob("*_3_mask.tif")).unlink()
    with pytest.raises(DataError, match=r"site CS, .*_3_mask\.tif: cannot be read"):
        check_federation(sites)


def test_retina_vessels_and_folds_that_keep_both_eyes_of_a_child_together(tmp_path):
    write_retina(tmp_path)
    sites = open_benchmark("retina_vessels", tmp_path)
    assert counts(sites) == {"AVWIDE": (3, 1, 1), "CHASEDB1": (6, 2, 2)}
    assert check_federation(sites) == ("segmentation", 3, ("background", "vessel"))
    tested = []
    for fold in range(1, 6):
        site = open_benchmark("retina_vessels", tmp_path, folds=5, fold=fold)[1]
        assert counts([site]) == {"CHASEDB1": (6, 2, 2)}
        assert all({c.name[-1] for c in site.cases[split]} == {"L", "R"} for split in site.cases)
        assert len({case.patient for case in site.cases["test"]}) == 1
        tested += [case.name for case in site.cases["test"]]
    assert sorted(tested) == sorted(f"{patient}{eye}" for patient in range(5) for eye in "LR")
    (tmp_path / "AVWIDE").rename(tmp_path / "elsewhere")
    with pytest.raises(
        DataError, match=r"site elsewhere, .*: no site of the retinal vessels, whose sites are"
    ):
        open_benchmark("retina_vessels", tmp_path)
    with pytest.raises(DataError, match=r"nowhere: is missing, and retina_vessels needs it.*STARE"):
        open_benchmark("retina_vessels", tmp_path / "nowhere")
