"""Sites that have outlined different structures, or nothing, in one federation: data, runs and pages."""

import json

import pytest
import torch
from finished_runs import simulated
from hospitals import Deployment, Hospital
from running import TINY_NETWORK, command

from medfedaug.config.run import RunConfig
from medfedaug.data.datasets.partial_phantom import TRUTH, annotate_apart
from medfedaug.data.datasets.phantom import make_phantom
from medfedaug.federation.job_summary import summary
from medfedaug.methods import parse_methods
from medfedaug.nvflare_jobs.kit.kit import open_kit
from medfedaug.privacy import PrivacyLedger
from medfedaug.runs.annotated import BORROWED, OWN, UNKNOWN, Annotated

STRUCTURES = ("lesion", "ventricles", "deep grey matter", "white matter")
OWNED = {"site_A": STRUCTURES[:2], "site_B": STRUCTURES[1:3], "site_C": STRUCTURES[2:], "site_D": ()}


@pytest.fixture(scope="module")
def phantom(tmp_path_factory):
    root = tmp_path_factory.mktemp("partial") / "data"
    make_phantom(root, patients=3, shape=(48, 48, 5), classes=5)
    assert annotate_apart(root, unlabelled=["site_D"], sparse=0.6) == OWNED
    return root


@pytest.fixture(scope="module")
def run(phantom, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "condist"
    return simulated(phantom, out, "condist,teacher,fedrdn", "--partial-loss", "exclusion")


def test_the_truth_is_kept_beside(phantom, tmp_path):
    full = tmp_path / "full"
    make_phantom(full, patients=3, shape=(48, 48, 5), classes=5)
    for file in full.glob("site_*/**/*.*"):
        kept = phantom / TRUTH / file.relative_to(full)
        assert kept.read_bytes() == file.read_bytes()
    assert not list((phantom / "site_D" / "labels").iterdir())


def test_a_class_is_scored_where_it_is_outlined_and_pages_say_so(run):
    record = json.loads((run / "results.json").read_text())
    assert record["labelled"] == {site: list(own) for site, own in OWNED.items()}
    for site, own in OWNED.items():
        assert record["test"]["sites"][site].get("classes", {}).keys() == {*own}
    assert record["test"]["sites"]["site_D"]["dice"] is None
    kinds = Annotated.of(record)
    assert [kinds.kind("site_A", name) for name in STRUCTURES] == [OWN, OWN, BORROWED, BORROWED]
    nobody = Annotated(("gland",), {"A": []}, ("A",), {}, "dice")
    assert nobody.kind("A", "gland") == UNKNOWN
    assert "nobody knows" in nobody.sentence("A", "gland")
    card = (run / "model_card.md").read_text()
    assert "has outlined ventricles, deep grey matter." in card
    assert "| borrowed |" in card
    methods = record["rounds"][0]["methods"]
    assert {site for name in ("condist", "teacher") for site in methods.get(name, {})} <= {*OWNED} or methods


def test_prediction_marks_borrowed_classes(run, phantom, tmp_path):
    images = phantom / "site_B" / "images"
    code, _, err = command(
        *("predict", "--model", run, "--images", images, "--site", "site_B", "--out", tmp_path / "p")
    )
    assert code == 0, err
    notes = json.loads((tmp_path / "p" / "predictions.json").read_text())["notes"]
    own = [note for note in notes if "never outlined at site site_B" in note]
    assert [note.split(" was ")[0] for note in own] == [STRUCTURES[0], STRUCTURES[3]]
    assert all("is of other sites" in note or "no site has a Dice" in note for note in own)


def test_a_site_without_outlines_needs_a_method_that_learns_without(phantom, tmp_path):
    options = ("--methods", "fedavg", "--engine", "inprocess", "--out", tmp_path / "run")
    code, _, err = command("simulate", "--data", phantom, *options)
    assert code != 0
    assert "site_D" in err
    assert "condist or teacher" in " ".join(err.split())
    assert "--holdout site_D" in " ".join(err.split())


def test_methods_that_need_every_label_are_refused(phantom, tmp_path):
    code, _, err = command(
        *("simulate", "--data", phantom, "--methods", "feddg,condist", "--out", tmp_path / "run"),
        *("--engine", "inprocess"),
    )
    assert code != 0
    assert "complete_labels" in err


def test_with_everything_outlined_methods_and_settings_change_no_bit(phantom, tmp_path):
    models = [
        torch.load(simulated(phantom / TRUTH, tmp_path / name, methods, *more) / "final_model.pt")
        for name, methods, more in (
            ("plain", "fedavg", ()),
            ("taught", "condist,teacher", ("--partial-loss", "exclusion")),
            ("by_class", "class_mean", ()),
        )
    ]
    for other in models[1:]:
        assert all(torch.equal(value, other[key]) for key, value in models[0].items())


def test_what_a_site_has_annotated_is_in_its_ledger_and_on_the_approval_page(phantom, tmp_path):
    config = RunConfig(
        methods=tuple(parse_methods("condist,fedrdn")),
        classes=("background", *STRUCTURES),
        **TINY_NETWORK,
        batch_size=4,
        rounds=1,
        unlabelled_weight=0.5,
    )
    sites = [
        Hospital(
            tmp_path / name,
            phantom / name,
            privacy={"min_images": 1, "scores": "cases"},
            jobs={"min_cases": 1},
        )
        for name in OWNED
    ]
    deployment = Deployment(sites)
    server = deployment.run(config)
    assert server.record.labelled == {site: list(own) for site, own in OWNED.items()}
    for site in sites:
        known = ", ".join(OWNED[site.name]) or "none"
        told = [
            entry.release.shape for entry in PrivacyLedger(site.kit / "medfedaug/ledger.sqlite").entries()
        ]
        assert f"annotated classes: {known}" in told
        page = summary(open_kit(site.kit).job_book().entries()[0])
        assert any("classes that this site has annotated" in line for line in page)
    counts = {site: reply.num_samples for site, reply in deployment.replies if reply.task == "prepare"}
    assert counts["site_D"] == round(0.5 * 5)
