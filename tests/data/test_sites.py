"""Every fault of a site's folder is one line that names the site and the file."""

import json
import re

import numpy as np
import pytest
import torch
from benchmark_files import write_volume
from PIL import Image

from medfedaug.data.sites import arrange, check_federation, find_sites, open_site, site_statistics
from medfedaug.data.volumes import VolumeFolder
from medfedaug.errors import ConfigError, DataError
from medfedaug.federation import SiteTrainer, resolve_data_folder, run_in_process


def edit(folder, change):
    listing = folder / "dataset.json"
    content = json.loads(listing.read_text())
    change(content)
    listing.write_text(json.dumps(content))


def test_reads_cases_as_channel_first_volumes(make_site):
    site = VolumeFolder.open(make_site("A", channels=2))
    image, label = site.load_case(site.cases["training"][0])
    assert site.check_files() == 2
    assert image.shape == (2, 16, 16, 4)
    assert image.dtype == torch.float32
    assert label.shape == (1, 16, 16, 4)
    assert label.dtype == torch.uint8


def test_scaled_intensities_are_per_volume(make_site):
    site = VolumeFolder.open(make_site("A"))
    image = site.load_image(site.cases["test"][0], "scale")
    assert float(image.min()) == 0.0
    assert float(image.max()) == 1.0


def test_limit_is_per_split(make_site):
    site = VolumeFolder.open(make_site("A", cases=(4, 3, 1)), limit=2)
    assert [len(cases) for cases in site.cases.values()] == [2, 2, 1]


def test_statistics_equal_numpy(make_site):
    site = VolumeFolder.open(make_site("A", channels=2, cases=(3, 1, 1)))
    volumes = [site.load_image(case).double().numpy() for case in site.cases["training"]]
    rows = [volume.reshape(2, -1) for volume in volumes]
    statistics = site_statistics(site)
    np.testing.assert_allclose(statistics.mean, np.mean([v.mean(1) for v in rows], axis=0), rtol=1e-12)
    np.testing.assert_allclose(statistics.std, np.mean([v.std(1) for v in rows], axis=0), rtol=1e-9)
    assert statistics.count == 3


def test_an_unseen_site_has_statistics_of_its_test_images(make_site):
    site = VolumeFolder.open(make_site("A", cases=(0, 0, 2)))
    assert not site.trains
    assert site_statistics(site).count == 2


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def listing(**entries):
    return lambda folder: edit(folder, lambda content: content.update(entries))


def row_in_test(image="images/0.nii.gz"):
    return lambda folder: edit(
        folder, lambda c: c["test"].append({"image": image, "label": "labels/0.nii.gz"})
    )


def contains(name, content):
    return lambda folder: (folder / name).write_bytes(content)


def zeros(name, *shape, dtype=np.float32):
    return lambda folder: write_volume(folder / name, np.zeros(shape, dtype))


def same_name(folder):
    zeros("images/0.nii", 16, 16, 4)(folder)
    row_in_test("images/0.nii")(folder)


IMAGE, LABEL, LIST = "images/0.nii.gz", "labels/0.nii.gz", "dataset.json"
FAULTS = {
    "missing label": (lambda f: (f / LABEL).unlink(), LABEL, "missing"),
    "not an image": (contains(IMAGE, b"no image at all"), IMAGE, "cannot be read"),
    "empty file": (contains(IMAGE, b""), IMAGE, "cannot be read"),
    "other shape": (zeros(LABEL, 16, 16, 5, dtype=np.uint8), LABEL, "16 x 16 x 5", "16 x 16 x 4"),
    "other channels": (zeros(IMAGE, 16, 16, 4, 2), "channels", "images/"),
    "empty split": (listing(validation=[]), LIST, "'validation' is empty"),
    "no case": (listing(training=[], validation=[], test=[]), LIST, "no case"),
    "duplicate": (row_in_test(), IMAGE, "more than once"),
    "no list": (listing(training="images"), LIST, "'training'"),
    "no label key": (lambda f: edit(f, lambda c: c["training"][0].pop("label")), LIST, "'training'"),
    "odd classes": (listing(labels={"0": "a", "-5": "b"}), LIST, "'labels'"),
    "not JSON": (contains(LIST, b"{"), LIST, "not readable as JSON"),
    "key twice": (contains(LIST, b'{"test": [], "test": []}'), LIST, "'test' occurs twice"),
    "class twice": (listing(labels={"0": "a", "1": "a"}), LIST, "different names"),
    "duplicate by another path": (row_in_test("images/../images/0.nii.gz"), IMAGE, "more than once"),
    "duplicate name": (same_name, "images/0.nii", f"{IMAGE}, has the same name 'images/0'"),
    "no dataset.json": (lambda f: (f / LIST).unlink(), "Basel", "not readable as JSON"),
    "label of two channels": (zeros(LABEL, 16, 16, 4, 2, dtype=np.uint8), LABEL, "2 channels, expected one"),
    "flat": (zeros(IMAGE, 16, 16), IMAGE, "2-dimensional"),
    "truncated": (lambda f: truncate(f / IMAGE), IMAGE, "cannot be read"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_name_site_and_file(make_site, fault):
    folder = make_site("Basel")
    change, *words = FAULTS[fault]
    change(folder)
    with pytest.raises(DataError) as caught:
        VolumeFolder.open(folder).check_files()
    message = str(caught.value)
    assert "\n" not in message
    for word in ("site Basel", *words):
        assert word in message


def with_value(value):
    voxels = np.random.default_rng(0).normal(size=(16, 16, 4)).astype(np.float32)
    voxels[3:5, 7, 2] = value
    return lambda folder: write_volume(folder / "images/0.nii.gz", voxels)


def both_infinities(folder):
    voxels = np.zeros((16, 16, 4), np.float32)
    voxels[0, 0, 0], voxels[0, 0, 1] = np.inf, -np.inf
    write_volume(folder / "images/0.nii.gz", voxels)


def labels_with(value, dtype=np.uint8):
    return lambda folder: write_volume(folder / "labels/0.nii.gz", np.full((16, 16, 4), value, dtype))


NOT_FINITE = (IMAGE, "has NaN or infinite voxels")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        *((with_value(value), NOT_FINITE) for value in (np.nan, np.inf, -np.inf)),
        (both_infinities, NOT_FINITE),
        (
            lambda f: write_volume(f / "images/0.nii.gz", np.full((16, 16, 4), 3, np.float32)),
            ("images/0.nii.gz", "is constant: every voxel is 3"),
        ),
        (labels_with(7), (LABEL, "label values 7,", "[0, 1]")),
        (labels_with(0.5, np.float32), (LABEL, "label values 0.5,")),
        (labels_with(-1, np.int16), (LABEL, "label values -1,")),
    ],
)
def test_faults_inside_a_volume_name_site_and_file(make_site, change, words):
    folder = make_site("Basel")
    change(folder)
    site = VolumeFolder.open(folder)
    with pytest.raises(DataError) as caught:
        site.load_case(site.cases["training"][0])
    for word in ("site Basel", *words):
        assert word in str(caught.value)


def test_a_channel_that_is_constant_in_every_image_is_marked(make_site):
    """Beside one that varies; images that are constant in all channels have no statistics."""
    folder = make_site("Basel", channels=2, cases=(1, 1, 1))
    voxels = np.random.default_rng(0).normal(size=(16, 16, 4, 2)).astype(np.float32)
    voxels[..., 1] = 3
    write_volume(folder / "images/0.nii.gz", voxels)
    statistics = site_statistics(VolumeFolder.open(folder))
    assert statistics.constant == (1,)
    assert statistics.std[1] == 0
    voxels[..., 0] = 5
    write_volume(folder / "images/0.nii.gz", voxels)
    with pytest.raises(DataError, match=r"site Basel, .*Basel: .* of channel 0 is 0\.0.*constant"):
        site_statistics(VolumeFolder.open(folder))


def test_cases_of_one_file_name_are_named_by_their_folders(make_site):
    folder = make_site("A", cases=(1, 1, 1))
    listed = {}
    for index, split in enumerate(("training", "validation", "test")):
        (folder / str(index)).mkdir()
        (folder / f"images/{index}.nii.gz").rename(folder / f"{index}/flair.nii.gz")
        listed[split] = [{"image": f"{index}/flair.nii.gz", "label": f"labels/{index}.nii.gz"}]
    edit(folder, lambda c: c.update(listed))
    site = VolumeFolder.open(folder)
    assert [case.name for split in site.cases.values() for case in split] == ["0/flair", "1/flair", "2/flair"]


def test_an_empty_site_is_none(make_site, tmp_path):
    make_site("A")
    (tmp_path / "data/Basel").mkdir()
    assert [site.name for site in find_sites(tmp_path / "data")] == ["A"]
    with pytest.raises(DataError, match=r"site Basel, .*Basel: holds neither a dataset\.json nor images"):
        open_site(tmp_path / "data/Basel")
    with pytest.raises(DataError, match=r"site Basel, .*Basel: no data of a site"):
        resolve_data_folder("Basel", tmp_path / "data/Basel")


def test_two_sites_of_one_name(make_site, tmp_path):
    sites = [open_site(make_site("A", root=tmp_path / folder)) for folder in ("north", "south")]
    with pytest.raises(DataError, match=r"site A, .*north/A: two sites have this name"):
        check_federation(sites)


def test_a_single_image_trains(make_site, tmp_path, tiny_config):
    """One slice of 32 x 32 leaves batch norm four values a channel."""
    for name in "AB":
        make_site(name, shape=(32, 32, 3), cases=(1, 1, 1))
    five_levels = {"channels": [4] * 5, "strides": [2] * 4, "num_res_units": 0}
    config = tiny_config("fedrdn,fedfa", rounds=1, network_args=five_levels)
    assert run_in_process(config, tmp_path / "data", ["A", "B"], "cpu").results()["selected_round"] == 1


def train_once(config, data):
    trainer = SiteTrainer(config, data, "cpu")
    trainer.open("A")
    trainer.train(1)
    return trainer


def test_one_image_left_over_makes_no_batch_of_its_own(make_site, tmp_path, tiny_config):
    for name in "AB":
        make_site(name, shape=(16, 16, 4), cases=(5, 1, 1))  # two slices with foreground each
    trainer = train_once(tiny_config(rounds=1, batch_size=3), tmp_path / "data")
    assert [len(batch["image"]) for batch in trainer.samples.loader(trainer.own_dataset(0), 0)] == [3, 3, 3]
    trainer = train_once(tiny_config(rounds=1, batch_size=4), tmp_path / "data")
    assert [len(batch["image"]) for batch in trainer.samples.loader(trainer.own_dataset(0), 0)] == [4, 4, 2]


def test_no_site_and_no_folder(tmp_path):
    with pytest.raises(DataError, match="no site found"):
        find_sites(tmp_path)
    with pytest.raises(DataError, match="no such folder"):
        find_sites(tmp_path / "nowhere")


@pytest.mark.parametrize("pair", [("images", "masks"), ("imagesTr", "labelsTr")], ids="-".join)
def test_images_beside_label_maps_are_no_classes(tmp_path, pair):
    for part in pair:
        folder = tmp_path / "hospital" / part
        folder.mkdir(parents=True)
        Image.new("L", (8, 8)).save(folder / "0.png")
    words = rf"holds {pair[0]} and {pair[1]}, .*run `medfedaug init "
    with pytest.raises(DataError, match=rf"{words}\S*hospital`"):
        find_sites(tmp_path)


@pytest.mark.parametrize("name", ["A\x1b[2J", " A", "\u202eA"])
def test_names_that_cannot_be_printed(make_site, tmp_path, name):
    make_site("A")
    make_site(name)
    with pytest.raises(DataError, match="not a name for a site"):
        check_federation(find_sites(tmp_path / "data"))


def test_any_printable_name_is_a_name(make_site, tmp_path):
    names = ["Genève", "St. Anna, A", "Zürich Süd", "東京"]
    for name in names:
        make_site(name)
    sites = find_sites(tmp_path / "data")
    assert sorted(site.name for site in sites) == names
    assert check_federation(sites)[0] == "segmentation"


def test_sites_must_fit_each_other(make_site, tmp_path):
    make_site("A")
    with pytest.raises(DataError, match=r"two sites with training cases, found 1 \(A\)"):
        check_federation(find_sites(tmp_path / "data"))
    folder = make_site("B", channels=2)
    with pytest.raises(DataError, match=r"site B.*2 channels, A's have 1"):
        check_federation(find_sites(tmp_path / "data"))
    folder = make_site("B")
    edit(folder, lambda c: c["labels"].update({"2": "edema"}))
    with pytest.raises(DataError, match=r"site B.*3 classes, site A has 2"):
        check_federation(find_sites(tmp_path / "data"))
    edit(folder, lambda c: c["labels"].pop("2"))
    assert check_federation(find_sites(tmp_path / "data")) == ("segmentation", 1, ("background", "lesion"))
    with pytest.raises(ConfigError, match="'C'; the sites are A, B"):
        check_federation(find_sites(tmp_path / "data"), holdout=["C"])
    with pytest.raises(DataError, match="found 1"):
        check_federation(find_sites(tmp_path / "data"), holdout=["B"])


def test_names_of_classes_decide_whatever_their_order(make_site, tmp_path):
    edit(make_site("A"), lambda c: c["labels"].update({"1": "lesion", "2": "edema"}))
    edit(make_site("B"), lambda c: c["labels"].update({"1": "edema", "2": "lesion"}))
    own = find_sites(tmp_path / "data")[1]
    first, second = arrange(find_sites(tmp_path / "data"))
    assert second.classes == first.classes == ("background", "lesion", "edema")
    case = own.cases["training"][0]
    assert second.load_label(case).any()
    assert torch.equal(second.load_label(case), 2 * own.load_label(case))


def test_a_site_in_place_of_its_parent_is_named(phantom_dir):
    words = f"site_A: is a site itself.*Name the folder that holds it: {re.escape(str(phantom_dir))}"
    with pytest.raises(DataError, match=words):
        find_sites(phantom_dir / "site_A")
