"""Patients with several cases: what `patient` in `dataset.json` means for what leaves a site."""

import json

import pytest

from medfedaug.data.base import Case
from medfedaug.data.images import ImageFolder
from medfedaug.data.volumes import VolumeFolder
from medfedaug.errors import DataError, JobRefused
from medfedaug.federation.messages.messages import PREPARE, Request
from medfedaug.federation.site.site import Site
from medfedaug.federation.site.trainer import SiteTrainer
from medfedaug.hospital.privacy import PrivacyLedger, PrivacyPolicy
from medfedaug.hospital.privacy.guard import SitePrivacy
from medfedaug.hospital.privacy.release_log import case_identities
from medfedaug.runs.evaluate import evaluate_model
from medfedaug.simulate import simulate


@pytest.fixture
def of_patients(tmp_path):
    """A site by the patients of its training cases, each with the number of its images; "" names nobody."""

    def make(patients: dict[str, range]) -> ImageFolder:
        cases = []
        for patient, numbers in patients.items():
            for number in numbers:
                path = tmp_path / f"{patient}_{number}.png"
                path.write_bytes(path.name.encode())  # an identity is of the file's bytes
                cases.append(Case(path.name, path, "x", patient=patient))
        return ImageFolder(
            "A", tmp_path, ("x", "y"), {"training": tuple(cases), "validation": (), "test": ()}
        )

    return make


@pytest.mark.parametrize(
    ("patients", "allowed", "sent"), [("aabc", 1, False), ("aabc", 2, True), ("abcd", 1, True)]
)
def test_noise_covers_as_many_cases_as_a_patient_has(make_site, tiny_config, patients, allowed, sent):
    """The list says that a patient has two cases: noise for one would not hide the patient."""
    folder = make_site("A", cases=(4, 1, 1))
    content = json.loads((folder / "dataset.json").read_text())
    for row, patient in zip(content["training"], patients, strict=True):
        row["patient"] = patient
    (folder / "dataset.json").write_text(json.dumps(content))
    policy = PrivacyPolicy(
        min_images=1,
        noise_multiplier=1.0,
        epsilon=100.0,
        clip={"intensity_mean": (0, 1), "intensity_std": (0.01, 1)},
        cases_per_patient=allowed,
    )
    config = tiny_config("fedrdn", classes=("background", "lesion"))
    reply = Site("A", SiteTrainer(config, folder, "cpu", privacy=SitePrivacy(policy))).answer(
        Request(PREPARE)
    )
    if sent:
        assert reply.error == ""
        assert set(reply.payload) == {"fedrdn/mean", "fedrdn/std", "fedrdn/count"}
        assert "constant_channels" not in reply.metrics["input"]
    else:
        words = "site A: fedrdn: a patient has 2 training cases, and noise would hide 1 (cases_per_patient of"
        assert reply.error.startswith(words)
        assert not reply.payload


def test_images_of_a_patient_share_a_budget(of_patients):
    ledger = PrivacyLedger()
    spent = [
        ledger.spend(1.0, 1e-5, 100.0, case_identities(of_patients(patients), "training"))
        for patients in ({"a": range(1), "b": range(1)}, {"b": range(1, 2)}, {"": range(2)})
    ]
    assert spent[1] > spent[0]
    assert spent[2] == pytest.approx(spent[0])


def test_a_site_counts_its_patients_before_statistics_leave(make_site, tiny_config):
    folder = make_site("A", cases=(4, 1, 1))
    content = json.loads((folder / "dataset.json").read_text())
    for row, patient in zip(content["training"], "abbb", strict=True):
        row["patient"] = patient
    (folder / "dataset.json").write_text(json.dumps(content))
    config = tiny_config("fedrdn", classes=("background", "lesion"))
    trainer = SiteTrainer(config, folder, "cpu", privacy=SitePrivacy(PrivacyPolicy(min_images=3)))
    error = Site("A", trainer).answer(Request(PREPARE)).error
    assert "fedrdn's statistics would summarise 2 patients, and this site needs at least 3" in error


@pytest.mark.parametrize(("trains", "tests"), [(7, "7"), ("7", " 7 "), ("0", 0)])
def test_one_patient_in_training_and_test_is_refused_however_the_list_writes_the_name(
    make_site, trains, tests
):
    """Also where the site has a folder of the patient's name."""
    folder = make_site("A")
    (folder / str(trains)).mkdir()
    content = json.loads((folder / "dataset.json").read_text())
    content["training"][0]["patient"], content["test"][0]["patient"] = trains, tests
    (folder / "dataset.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=rf"patient {trains} is in test, and in training with 0"):
        VolumeFolder.open(folder)


# ---------------------------------------------------------------- whose cases are scored


@pytest.fixture
def tested_patients(make_site):
    """A site's folder, whose six test cases are of three patients; and which cases are whose."""
    folder = make_site("A", cases=(2, 1, 6))
    content = json.loads((folder / "dataset.json").read_text())
    for row, patient in zip(content["test"], ("Meyer", "Alt", "Meyer", "Alt", "Meyer", "Zorn"), strict=True):
        row["patient"] = patient
    (folder / "dataset.json").write_text(json.dumps(content))
    names = [row["image"].split("/")[1].split(".")[0] for row in content["test"]]
    return folder, [{names[0], names[2], names[4]}, {names[1], names[3]}, {names[5]}]


def together(patients: dict) -> list[set[str]]:
    """The cases of each patient."""
    groups: dict[int, set[str]] = {}
    for case, number in patients.items():
        groups.setdefault(number, set()).add(case)
    return list(groups.values())


def test_a_run_and_its_evaluation_record_which_scored_cases_are_of_one_patient_and_no_name(
    tested_patients, make_site, tiny_config, tmp_path
):
    folder, whose = tested_patients
    make_site("B")
    config = tiny_config("fedavg", classes=("background", "lesion"), rounds=1, local_steps=1)
    run = tmp_path / "run"
    results = simulate(folder.parent, run, config, engine="inprocess", device="cpu", report=False)
    entry = results["test"]["sites"]["A"]
    assert together(entry["patients"]) == whose
    assert entry["patients"].keys() == entry["cases"].keys()
    assert "patients" not in results["test"]["sites"]["B"]  # which names nobody
    assert "Meyer" not in (run / "results.json").read_text()
    evaluated = evaluate_model(run / "global_model.pt", folder.parent, device="cpu")
    assert together(evaluated["sites"]["A"]["patients"]) == whose


def test_the_least_number_of_cases_of_a_job_is_one_of_patients():
    policy = PrivacyPolicy(min_images=3)
    policy.check_patients("A", (1, 1, 1))
    with pytest.raises(JobRefused, match=r"12 cases of 2 patients would train.* policy is 3"):
        policy.check_patients("A", (10, 2))


def test_numbers_of_cases_leave_by_their_patients(tested_patients, tiny_config):
    """Six test cases are of three patients, two training cases of two, and one validation case of one."""
    folder, _ = tested_patients
    privacy = SitePrivacy(PrivacyPolicy(min_images=2))
    trainer = SiteTrainer(tiny_config(classes=("background", "lesion")), folder, "cpu", privacy=privacy)
    reply = Site("A", trainer).answer(Request("prepare", run="0" * 32))
    assert reply.error == ""
    assert reply.metrics["cases"] == {"training": 2, "test": 6}
