"""Sites that have outlined different structures, or nothing, in one federation: data, runs and pages."""

import json
import shutil

import pytest
import torch
from finished_runs import simulated
from hospitals import Deployment, Hospital
from running import TINY_NETWORK, command

from medfedaug.analysis.score_table import cells_note
from medfedaug.config.run import RunConfig
from medfedaug.data.phantom import make_phantom
from medfedaug.data.sites import find_sites, open_site
from medfedaug.errors import MedFedAugWarning
from medfedaug.federation.planning.fingerprint import fingerprint
from medfedaug.federation.site.trainer import SiteTrainer
from medfedaug.hospital.privacy import PrivacyLedger, PrivacyPolicy
from medfedaug.hospital.privacy.guard import SitePrivacy
from medfedaug.hospital.privacy.job_log import summary
from medfedaug.hospital.privacy.site_settings import SiteSettings
from medfedaug.methods import parse_methods
from medfedaug.nvflare_jobs.kit.kit import open_kit
from medfedaug.research.datasets.partial_phantom import TRUTH, annotate_apart
from medfedaug.runs.load_results import load_run
from medfedaug.runs.model_score import BORROWED, OWN, UNKNOWN, Annotated
from medfedaug.simulate import configure, simulate

STRUCTURES = ("lesion", "ventricles", "deep grey matter", "white matter")
OWNED = {"site_A": STRUCTURES[:2], "site_B": STRUCTURES[1:3], "site_C": STRUCTURES[2:], "site_D": ()}


@pytest.fixture(scope="module")
def phantom(tmp_path_factory):
    root = tmp_path_factory.mktemp("partial") / "data"
    make_phantom(root, patients=3, shape=(48, 48, 5), classes=5)
    assert annotate_apart(root, unlabelled=["site_D"], sparse=0.6) == OWNED
    outline_test_cases(root, "site_B")
    return root


def outline_test_cases(root, site):
    """Outline everything in the test cases of a site, whose training cases stay as they are."""
    file, truth = root / site / "dataset.json", root / TRUTH / site
    content, complete = json.loads(file.read_text()), json.loads((truth / "dataset.json").read_text())
    for row in content["test"]:
        row["labelled"] = list(STRUCTURES)
        shutil.copy(truth / row["label"], root / site / row["label"])
    file.write_text(json.dumps({**content, "labels": complete["labels"]}))


@pytest.fixture(scope="module")
def run(phantom, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "condist"
    options = ("--partial-loss", "exclusion", "--unlabelled-weight", "1")
    return simulated(phantom, out, "condist,teacher,fedrdn", *options)


def test_a_class_is_scored_where_it_is_outlined_and_pages_say_so(run):
    record = json.loads((run / "results.json").read_text())
    assert record["labelled"] == {site: list(own) for site, own in OWNED.items()}
    for site, own in OWNED.items():
        entry, scored = record["test"]["sites"][site], STRUCTURES if site == "site_B" else own
        assert entry.get("classes", {}).keys() == {*scored}
        assert entry.get("case_classes", {}).keys() == {*scored}
        for label, by_case in entry.get("case_classes", {}).items():
            assert entry["classes"][label]["dice"] == pytest.approx(sum(by_case.values()) / len(by_case))
    assert record["test"]["sites"]["site_D"]["dice"] is None
    kinds = Annotated.of(record)
    assert [kinds.kind("site_A", name) for name in STRUCTURES] == [OWN, OWN, BORROWED, BORROWED]
    nobody = Annotated(("gland",), {"A": []}, ("A",), {}, "dice")
    assert nobody.kind("A", "gland") == UNKNOWN
    assert "nobody knows" in nobody.sentence("A", "gland")
    card = (run / "model_card.md").read_text()
    assert "has outlined ventricles, deep grey matter." in card
    assert "has outlined nothing." in card
    assert "Without outlines, site_D counts 1 of its samples in the average." in cells_note([load_run(run)])
    assert "| borrowed |" in card
    assert "white matter: not measured at this site; its images' mean intensity is " in card
    assert " (borrowed) |" in card  # the class that site B outlined in test cases alone
    methods = record["rounds"][0]["methods"]
    assert {site for name in ("condist", "teacher") for site in methods.get(name, {})} <= {*OWNED} or methods


@pytest.mark.parametrize(
    ("site", "borrowed", "remark"),
    [
        ("site_A", STRUCTURES[2:], "is not measured there"),
        ("site_B", (STRUCTURES[0], STRUCTURES[3]), "for training: its Dice there is"),
    ],
)
def test_prediction_marks_borrowed_classes(run, phantom, tmp_path, site, borrowed, remark):
    images, out = next((phantom / site / "images").iterdir()), tmp_path / "p"
    code, _, err = command("predict", "--model", run, "--images", images, "--site", site, "--out", out)
    assert code == 0, err
    record, page = json.loads((out / "predictions.json").read_text()), (out / "predictions.html").read_text()
    assert [*record["borrowed"]] == [*borrowed]
    assert {name for name in STRUCTURES if f"{name} (borrowed), ml" in page} == {*borrowed}
    assert f"this site outlined {', '.join(borrowed)} in no training case" in page
    notes = record["notes"]
    own = [note for note in notes if f"never outlined at site {site}" in note]
    assert [note.split(" was ")[0] for note in own] == [*borrowed]
    assert all(remark in note for note in own)
    assert all(note.endswith(" deviations from that of the nearest site that outlined it") for note in own)


@pytest.mark.parametrize(
    ("folder", "methods", "options", "added"),
    [
        (".", "fedavg", {}, ["class_mean", "condist"]),
        (".", "fedrdn", {}, ["class_mean", "condist"]),
        (".", "fedavg", {"partial_loss": "marginal"}, []),
        (".", "teacher", {}, []),
        (".", "single", {}, []),
        (TRUTH, "fedavg", {}, []),
    ],
)
def test_methods_for_different_structures_join_a_run_that_names_none(
    phantom, folder, methods, options, added
):
    run = configure(find_sites(phantom / folder), methods=parse_methods(methods), **TINY_NETWORK, **options)
    assert [method["name"] for method in run.methods] == [methods, *added]


def test_a_site_without_outlines_needs_a_method_that_learns_without(phantom, tmp_path):
    options = ("--methods", "fedavg", "--engine", "inprocess", "--out", tmp_path / "run")
    options += ("--unlabelled-weight", "1", "--partial-loss", "marginal")
    code, _, err = command("simulate", "--data", phantom, *options)
    assert code != 0
    assert "site_D" in err
    assert "condist or teacher" in " ".join(err.split())
    assert "--holdout site_D" in " ".join(err.split())


def test_a_site_without_outlines_is_tested_only_by_default_and_said(phantom, tmp_path):
    config = configure(find_sites(phantom), methods=({"name": "fedavg"},), **TINY_NETWORK, rounds=1)
    assert config.unlabelled_weight == 0
    with pytest.warns(
        MedFedAugWarning, match=r"site_D.* has outlined nothing, and is tested without training"
    ):
        run = simulate(phantom, tmp_path / "run", config, engine="inprocess", device="cpu", report=False)
    record = json.loads((tmp_path / "run/results.json").read_text())
    assert "site_D" in record["test"]["unseen"]
    assert "site_D" not in record["sites"]
    assert run.config == config


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


@pytest.mark.parametrize(
    ("policy", "labelled"),
    [({"min_images": 10}, ""), ({"min_images": 1, "epsilon": 8.0, "score_noise_multiplier": 8.0}, None)],
)
def test_no_class_of_few_patients_is_named_and_none_under_noise(phantom, policy, labelled):
    config = RunConfig(classes=("background", *STRUCTURES), **TINY_NETWORK, local_steps=1)
    trainer = SiteTrainer(config, phantom, "cpu", privacy=SitePrivacy(PrivacyPolicy.from_dict(policy)))
    trainer.open("site_A")
    assert trainer.prepare().metrics["input"].get("labelled") == labelled


def test_what_a_site_has_annotated_is_in_its_ledger_and_on_the_approval_page(phantom, tmp_path):
    config = RunConfig(
        methods=tuple(parse_methods("condist,fedrdn")),
        classes=("background", *STRUCTURES),
        **TINY_NETWORK,
        batch_size=4,
        rounds=1,
        unlabelled_weight=0.5,
    )
    sites = [Hospital(tmp_path / name, phantom / name, privacy={"min_images": 1}) for name in OWNED]
    deployment = Deployment(sites)
    server = deployment.run(config)
    assert server.record.labelled == {site: list(own) for site, own in OWNED.items()}
    for site in sites:
        known = ", ".join(OWNED[site.name]) or "none"
        notes = [
            entry.release.shape for entry in PrivacyLedger(site.kit / "medfedaug/ledger.sqlite").entries()
        ]
        assert f"annotated classes: {known}" in notes
        page = summary(open_kit(site.kit).job_book().entries()[0], SiteSettings())
        assert any("classes with enough annotated training patients" in line for line in page)
    counts = {site: reply.num_samples for site, reply in deployment.replies if reply.task == "prepare"}
    assert counts["site_D"] == round(0.5 * 5)


def test_a_plan_finds_classes_by_name_and_says_what_a_site_has_not_outlined(tmp_path):
    root = tmp_path / "data"
    make_phantom(root, sites=3, patients=3, shape=(32, 32, 4), classes=4)
    assert annotate_apart(root)["site_B"] == STRUCTURES[1:3]
    code, _, err = command("plan", "--data", root, "--out", tmp_path / "plan.json")
    assert code == 0, err
    page = (tmp_path / "plan.html").read_text()
    complete = open_site(root / TRUTH / "site_B")
    shares = fingerprint(complete, complete.classes)["foreground"].tolist()
    assert f"not outlined, {shares[1]:.2%}, {shares[2]:.2%}" in page
