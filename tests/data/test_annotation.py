"""Annotated classes of a site: read from `dataset.json`, mapped to the federation's, refused by name."""

import json
import shutil

import nibabel as nib
import numpy as np
import pytest
import torch

from medfedaug.data.sites import arrange, check_federation, check_voxels, find_sites, open_site
from medfedaug.errors import DataError
from medfedaug.research.comparison.inspection import inspect_sites

CLASSES = ("background", "liver", "spleen", "kidney")
ROWS = (("training", 2), ("validation", 1), ("test", 1))


def write_site(root, name, labels, labelled=None, values=None):
    """A site of small volumes, whose label maps have the given values."""
    folder = root / name
    (folder / "images").mkdir(parents=True)
    (folder / "labels").mkdir()
    R = np.random.RandomState([0, *name.encode()])
    content = {"labels": labels} if labels else {}
    if labelled is not None:
        content["labelled"] = labelled
    for split, count in ROWS:
        content[split] = []
        for index in range(count):
            row = {"image": f"images/{split}_{index}.nii.gz"}
            nib.save(nib.Nifti1Image(R.rand(16, 16, 3).astype(np.float32), np.eye(4)), folder / row["image"])
            if values is not None:
                row["label"] = f"labels/{split}_{index}.nii.gz"
                label = R.choice(values, (16, 16, 3)).astype(np.uint8)
                nib.save(nib.Nifti1Image(label, np.eye(4)), folder / row["label"])
            content[split].append(row)
    (folder / "dataset.json").write_text(json.dumps(content))
    return folder


def rewrite(folder, **changed):
    listing = folder / "dataset.json"
    listing.write_text(json.dumps({**json.loads(listing.read_text()), **changed}))


def change_rows(folder, change, *splits):
    content = json.loads((folder / "dataset.json").read_text())
    rewrite(folder, **{split: [change(row) for row in content[split]] for split in splits or dict(ROWS)})


@pytest.fixture(scope="module")
def written_sites(tmp_path_factory):
    root = tmp_path_factory.mktemp("sites")
    write_site(root, "A", {"0": "background", "1": "liver", "4": "Spleen"}, ["liver", "spleen"], [0, 1, 4])
    write_site(root, "B", {"0": "background", "3": "kidney", "9": "ignore"}, ["kidney"], [0, 3, 9])
    write_site(root, "C", None)
    return root


@pytest.fixture
def sites(written_sites, tmp_path):
    return shutil.copytree(written_sites, tmp_path / "sites")


def test_classes_are_the_union_by_name_and_codes_say_what_is_annotated(sites):
    folders = find_sites(sites)
    task, _, classes = check_federation(folders)
    assert task == "segmentation"
    assert [name.lower() for name in classes] == list(CLASSES)
    a, b, c = arrange(folders)
    assert a.annotation == b.annotation == c.annotation
    assert a.classes == classes
    assert [site.annotated() for site in (a, b, c)] == [classes[1:3], classes[3:], ()]
    for site, own, unknown in ((a, {0, 1, 2}, False), (b, {0, 3}, True), (c, {0}, True)):
        case = site.cases["training"][0]
        labels, known, annotated = site.annotation.decode(site.load_target(case)[1][None])
        assert {*labels.unique().tolist()} == own
        assert (~known).any() == unknown
        assert annotated[0].tolist() == [name in ("background", *site.annotated()) for name in classes]
        assert torch.equal(site.load_label(case)[None], labels)
    stored = np.asarray(nib.load(a.cases["training"][0].label).dataobj)
    assert np.array_equal(a.load_label(a.cases["training"][0])[0] == 2, stored == 4)
    check_voxels(folders)


def test_a_row_says_otherwise_for_its_own_case(sites):
    listing = json.loads((sites / "A" / "dataset.json").read_text())
    listing["training"][0]["labelled"] = ["liver"]
    del listing["training"][1]["label"]
    rewrite(sites / "A", training=listing["training"])
    a = arrange(find_sites(sites))[0]
    with pytest.raises(DataError, match=r"the class 'Spleen'; outlined classes: liver.*'labelled'"):
        a.load_label(a.cases["training"][0])
    codes = a.load_target(a.cases["training"][1])[1]
    _, known, annotated = a.annotation.decode(codes[None])
    assert not known.any()
    assert annotated.tolist() == [[True, False, False, False]]


def test_without_the_field_sites_and_refusals_are_as_before(tmp_path):
    names = {"0": "background", "1": "liver", "2": "spleen"}
    write_site(tmp_path, "A", names, values=[0, 1, 2])
    write_site(tmp_path, "B", names, values=[0, 1, 2])
    assert [site.annotation for site in arrange(find_sites(tmp_path))] == [None, None]
    write_site(tmp_path, "C", {"0": "background", "1": "liver"}, values=[0, 1])
    with pytest.raises(DataError, match=r'site C.*without spleen.*"labelled" in dataset.json'):
        check_federation(find_sites(tmp_path))
    rewrite(tmp_path / "C", labelled=["liver"])
    assert check_federation(find_sites(tmp_path))[2] == ("background", "liver", "spleen")


def test_errors_name_site_file_class_and_what_to_write(sites):
    label = sites / "B" / "labels" / "training_0.nii.gz"
    nib.save(nib.Nifti1Image(np.full((16, 16, 3), 1, np.uint8), np.eye(4)), label)
    rewrite(sites / "B", labels={"0": "background", "1": "liver", "3": "kidney"})
    with pytest.raises(DataError, match=r"site B.*training_0.*'liver'.*outlined classes: kidney.*'labelled'"):
        check_voxels(find_sites(sites))
    rewrite(sites / "B", labelled=["kidny"])
    with pytest.raises(DataError, match=r"site B.*'kidny'.*liver, kidney.*spell"):
        open_site(sites / "B")
    rewrite(sites / "B", labelled=["kidney"], ignore=3)
    with pytest.raises(DataError, match=r"site B.*'ignore' is 3, and 'labels' has .*kidney.*255"):
        open_site(sites / "B")
    rewrite(sites / "B", ignore=9)
    with pytest.raises(DataError, match=r"site B.*has outlined 'kidney'.*are liver, kidneys.*'kidneys'"):
        open_site(sites / "B").with_classes(("background", "liver", "kidneys"))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"labelled": "kidney"}, "site B.*'labelled' must be a list of names"),
        ({"labelled": []}, r"site B.*training_0.*'kidney'; outlined classes: none\."),
        ({"ignore": 7}, "site B.*'ignore' is 7, and 'labels' has .*9"),
        ({"labels": {"0": "background", "3": "kidney", "4": "Kidney"}}, "site B.*different names"),
        ({"labels": {"0": "liver", "3": "kidney"}}, "site B.*'liver' as its lowest value.*background"),
    ],
)
def test_what_would_be_learned_wrongly_is_refused(sites, changed, words):
    rewrite(sites / "B", **changed)
    with pytest.raises(DataError, match=words) as caught:
        check_voxels(arrange(find_sites(sites)))
    assert "\n" not in str(caught.value)


def test_a_row_may_have_nothing_of_its_own_or_a_label_that_is_null(sites):
    change_rows(sites / "B", lambda row: {**row, "label": None}, "training")
    change_rows(sites / "A", lambda row: {**row, "labelled": []}, "training")
    with pytest.raises(DataError, match=r"site A.*training_0.*outlined classes: none"):
        check_voxels(arrange(find_sites(sites)))
    for label in (sites / "A" / "labels").glob("training_*"):
        nib.save(nib.Nifti1Image(np.zeros((16, 16, 3), np.uint8), np.eye(4)), label)
    a, b, _ = arrange(find_sites(sites))
    assert a.annotated("training") == b.annotated("training") == ()
    _, code = a.load_target(a.cases["training"][0])
    decoded = a.annotation.decode(code[None])
    assert decoded.known.all()
    assert decoded.annotated.tolist() == [[True, False, False, False]]


def test_a_federation_in_which_nobody_outlined_anything_is_refused(sites):
    assert check_federation(find_sites(sites))
    for name in "AB":
        change_rows(sites / name, lambda row: {"image": row["image"]}, "training")
    with pytest.raises(DataError, match="no site that trains has outlined anything"):
        check_federation(find_sites(sites))


def test_a_listed_class_that_no_case_shows_is_refused(sites):
    for label in (sites / "A" / "labels").iterdir():
        nib.save(nib.Nifti1Image(np.ones((16, 16, 3), np.uint8), np.eye(4)), label)
    with pytest.raises(DataError, match=r"site A.*'Spleen' as outlined, but no label map has it.*labelled"):
        check_voxels(find_sites(sites))


def test_inspection_names_spellings_and_classes_that_few_or_none_have_outlined(sites):
    rewrite(sites / "B", labels={"0": "background", "3": "kidneys", "9": "ignore", "7": "gland"}, labelled=[])
    change_rows(sites / "B", lambda row: {"image": row["image"]})
    names = ["kidney", "spleen"]
    rewrite(sites / "A", labels={"0": "background", "1": "kidney", "4": "spleen"}, labelled=names)
    reasons = {site.name: [odd.reason for odd in site.odd] for site in inspect_sites(sites)}
    (same, nothing) = [reason for reason in reasons["B"] if "kidneys" in reason]
    assert "'kidneys' may be the 'kidney' of site A" in same
    assert "write 'kidney' in labels and labelled" in same
    assert nothing.startswith("no site has outlined 'kidneys'")
    assert any(reason.startswith("no site has outlined 'gland'") for reason in reasons["B"])
    assert any(reason.startswith("no other site has outlined 'kidney'") for reason in reasons["A"])
    assert not any("label map is empty" in reason for reason in (*reasons["B"], *reasons["C"]))


def reasons_of(root):
    return {site.name: " ".join(odd.reason for odd in site.odd) for site in inspect_sites(root)}


def test_a_declared_class_that_no_label_map_shows_is_named(tmp_path):
    write_site(tmp_path, "A", {"0": "background", "1": "liver", "2": "spleen"}, values=[0, 1])
    assert "none of 4 cases shows spleen" in reasons_of(tmp_path)["A"]
    rewrite(tmp_path / "A", labelled=["liver"])
    assert "spleen" not in reasons_of(tmp_path)["A"].partition("shows")[2]


@pytest.mark.parametrize(
    ("ours", "theirs", "asked"),
    [
        (["nucleus"], ["cell nucleus"], True),
        (["liver"], ["spleen"], False),
        (["tumour", "tumour core"], ["tumour core"], False),  # site A names both: two structures
    ],
)
def test_names_that_nearly_agree_are_asked_about_also_without_labelled(tmp_path, ours, theirs, asked):
    for name, classes in (("A", ours), ("B", theirs)):
        labels = {"0": "background", **{str(n): text for n, text in enumerate(classes, 1)}}
        write_site(tmp_path, name, labels, values=[*range(len(labels))])
    reason = reasons_of(tmp_path)["B"]
    assert (f"its class {theirs[0]!r} may be the {ours[0]!r} of site A" in reason) is asked
    assert "list what it has outlined under 'labelled'" in reason  # the likely cause of other classes


def test_a_site_without_outlines_need_not_name_classes(sites):
    change_rows(sites / "B", lambda row: {"image": row["image"]})
    path = sites / "B" / "dataset.json"
    listing = json.loads(path.read_text())
    path.write_text(json.dumps({split: listing[split] for split in dict(ROWS)}))
    reasons = [odd.reason for site in inspect_sites(sites) for odd in site.odd]
    assert not any("foreground" in reason for reason in reasons)
