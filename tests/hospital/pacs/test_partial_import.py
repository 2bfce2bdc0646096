"""Classes that a site has not outlined, through an import, and fields of the list that it does not write."""

import json

import pytest
from imports import Site, box, write_image, write_outline

KIDNEY, LIVER = box((3, 9), (4, 9), (1, 3)), box((12, 18), (4, 9), (1, 3))
OPTIONS = ("--labels", "seg", "--classes", "background,kidney,liver")
OPTIONS += ("--segments", "kidney=kidney", "--segments", "liver=liver")


@pytest.fixture
def site(run, tmp_path):
    return Site(run, tmp_path, ("--folder", tmp_path / "in"))


def write_study(tmp_path, patient, masks):
    files = write_image(tmp_path / "in" / patient, patient)
    write_outline(tmp_path / "in" / patient / "seg.dcm", files, masks, "20200101")


def listing(site):
    return json.loads((site.out / "dataset.json").read_text())


def rewrite(site, **fields):
    (site.out / "dataset.json").write_text(json.dumps({**listing(site), **fields}))


def test_a_class_that_no_study_outlines_is_not_labelled_until_one_does(site, tmp_path):
    write_study(tmp_path, "P1", {"Kidney": KIDNEY})
    said = site.load(["P1"], *OPTIONS)
    assert "no label map shows liver: counts as not outlined here" in said
    assert listing(site)["labelled"] == ["kidney"]
    write_study(tmp_path, "P2", {"Kidney": KIDNEY, "Liver": LIVER})
    said = site.load(["P1", "P2"], *OPTIONS)
    assert "not outlined" not in said
    assert "labelled" not in listing(site)


def test_the_option_says_which_classes_were_looked_for(site, tmp_path):
    write_study(tmp_path, "P1", {"Kidney": KIDNEY})
    said = site.load(["P1"], *OPTIONS, "--labelled", "kidney,liver")
    assert "no label map shows liver: all voxels are learned as other classes" in said
    assert "labelled" not in listing(site)
    site.load(["P1"], *OPTIONS, "--labelled", "kidney")
    assert listing(site)["labelled"] == ["kidney"]
    said = site.load(["P1"], *OPTIONS, "--labelled", "spleen", code=2)
    assert "--labelled 'spleen' is not known; choose from kidney, liver" in said


def test_fields_that_a_person_wrote_survive_the_next_import(site, tmp_path):
    write_study(tmp_path, "P1", {"Kidney": KIDNEY, "Liver": LIVER})
    site.load(["P1"], *OPTIONS)
    content = listing(site)
    (part,) = [part for part in ("training", "validation", "test") if content[part]]
    rows = [{**content[part][0], "labelled": ["kidney"], "reader": "two"}]
    rewrite(site, labelled=["kidney"], ignore=255, description="first ward", **{part: rows})
    write_study(tmp_path, "P2", {"Kidney": KIDNEY, "Liver": LIVER})
    said = site.load(["P1", "P2"], *OPTIONS)
    now = listing(site)
    assert (now["labelled"], now["ignore"], now["description"]) == (["kidney"], 255, "first ward")
    kept = site.rows[site.entries["P1"]["case"]]
    assert (kept["labelled"], kept["reader"]) == (["kidney"], "two")
    assert "label maps show liver, which 'labelled' in dataset.json lacks" in said


def test_a_site_without_outlines_is_split_too(site, tmp_path):
    patients = [f"P{n}" for n in range(5)]
    for patient in patients:
        write_image(tmp_path / "in" / patient, patient)
    site.load(patients)
    content = listing(site)
    assert [len(content[part]) for part in ("training", "validation", "test")] == [3, 1, 1]
    assert not any("label" in row for row in content["training"])
