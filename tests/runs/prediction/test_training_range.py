import json

import nibabel
import numpy as np
import pytest

from medfedaug.data.volumes import VolumeFolder
from medfedaug.runs.prediction.training_range import TrainingRange

CLASSES = ("background", "core", "rim")


@pytest.fixture
def site(tmp_path):
    """Two training cases whose voxels are 2 x 1 x 1 and 1 x 1 x 1 mm; the second has no rim."""
    rng, listed = np.random.default_rng(0), []
    for number, edge in enumerate((2, 1)):
        label = np.zeros((10, 10, 10), np.uint8)
        label[1:3, 1:3, 1] = label[6, 6, 6] = 1
        label[8, 8, 1 : 4 if number == 0 else 1] = 2
        for kind, voxels in (("image", rng.random(label.shape, np.float32)), ("label", label)):
            image = nibabel.Nifti1Image(voxels, np.diag([edge, 1, 1, 1]))
            nibabel.save(image, tmp_path / f"{kind}{number}.nii.gz")
        listed.append({"image": f"image{number}.nii.gz", "label": f"label{number}.nii.gz"})
    labels = {str(number): name for number, name in enumerate(CLASSES)}
    content = {"labels": labels, "training": listed, "validation": listed[:1], "test": listed[:1]}
    (tmp_path / "dataset.json").write_text(json.dumps(content))
    return VolumeFolder("site", tmp_path, CLASSES, VolumeFolder.list_cases(tmp_path, "site").cases)


def test_ranges_are_those_of_the_label_maps(site):
    found = TrainingRange.of_folder(site, CLASSES)
    assert found.cases == 2
    assert found.sizes == {"core": pytest.approx((0.005, 0.01)), "rim": pytest.approx((0.0, 0.006))}
    assert found.record()["classes"]["rim"] == {"cases": 2, "volume_ml": [*found.sizes["rim"]]}


def test_sizes_outside_are_named_in_millilitres(site):
    found = TrainingRange.of_folder(site, CLASSES)
    voxels = {"background": 990, "core": 8, "rim": 2}
    assert found.warnings({"voxels": voxels, "volume_ml": {"core": 0.008, "rim": 0.002}}) == []
    large = {"voxels": voxels, "volume_ml": {"core": 0.02, "rim": 0.002}}
    assert found.warnings(large) == ["core has 0.02 ml, and 0.005 to 0.01 in 2 training cases"]
    assert found.warnings({"voxels": voxels}) == []  # a file that does not say how large its voxels are
    none = {"voxels": {}, "volume_ml": {"core": 0.0, "rim": 0.0}}
    # A case without a rim is among the training cases, one without a core is not.
    assert found.warnings(none) == ["nothing of core is found, and each of 2 training cases has some"]


def test_sizes_are_shares_of_the_image_where_a_file_does_not_say_how_large_its_voxels_are(site, monkeypatch):
    monkeypatch.setattr(VolumeFolder, "affine", lambda self, case: None)
    found = TrainingRange.of_folder(site, CLASSES)
    assert found.sizes == {"core": pytest.approx((0.005, 0.005)), "rim": pytest.approx((0.0, 0.003))}
    assert found.warnings({"voxels": {"background": 990, "core": 8, "rim": 2}}) == [
        "core has 0.80% of the image, and 0.50% to 0.50% in 2 training cases"
    ]


def test_a_borrowed_class_has_no_range_and_cases_say_nothing_of_what_they_lack(site):
    """The second case has outlined the core alone, a third one has unknown voxels, a fourth no outlines."""
    file = site.path / "dataset.json"
    content = json.loads(file.read_text())
    label = nibabel.load(site.path / "label1.nii.gz")
    voxels = np.asarray(label.dataobj).copy()
    voxels[0] = 255
    nibabel.save(nibabel.Nifti1Image(voxels, label.affine), site.path / "label2.nii.gz")
    rows = [
        content["training"][0],
        {**content["training"][1], "labelled": ["core"]},
        {"image": "image1.nii.gz", "label": "label2.nii.gz"},
        {"image": "image1.nii.gz"},
    ]
    classes = (*CLASSES, "gland")
    listing = {**content, "labelled": ["core", "rim"], "ignore": 255, "training": rows}
    file.write_text(json.dumps(listing))
    partial = VolumeFolder.open(site.path, check=False).with_classes(classes)
    found = TrainingRange.of_folder(partial, classes)
    assert found.cases == 4
    assert found.shown == {"core": 2, "rim": 1}
    assert found.unknown == ["gland"]
    assert found.record()["classes"]["gland"] == {}
    voxels = {"background": 700, "core": 5, "rim": 3, "gland": 292}
    volume = {"core": 0.005, "rim": 0.006, "gland": 0.3}
    # A gland of any size is unlike nothing: the site never outlined one.
    assert found.warnings({"voxels": voxels, "volume_ml": volume}) == []
    assert found.warnings({"voxels": voxels, "volume_ml": {**volume, "rim": 0.0}}) == [
        "nothing of rim is found, and each of 1 training cases has some"
    ]
