"""Patients with several cases: what `patient` in `dataset.json` means for what leaves a site."""

from __future__ import annotations

import json

import pytest

from medfedaug.data.base import Case
from medfedaug.data.images import ImageFolder
from medfedaug.data.quality.content_hash import case_identities
from medfedaug.data.volumes import VolumeFolder
from medfedaug.errors import DataError, JobRefused, PrivacyRefused
from medfedaug.federation import run_in_process
from medfedaug.federation.messages.messages import PREPARE, Reply, Request
from medfedaug.federation.messages.privacy_guard import PrivacyGuard
from medfedaug.federation.server.evaluation import FEDERATION
from medfedaug.federation.site.evaluation import EvaluationSite, _Scored
from medfedaug.federation.site.release_log import Account, ScoreRequest
from medfedaug.federation.site.site import Site
from medfedaug.federation.site.trainer import SiteTrainer
from medfedaug.methods.base import SiteExchange
from medfedaug.metrics.significance import compare_patients
from medfedaug.privacy import JobRules, PrivacyLedger, PrivacyPolicy, Pseudonyms, released_scores
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


def sent(ledger: PrivacyLedger, job: str, site: ImageFolder, **policy) -> None:
    account = Account("A", job, ledger, PrivacyPolicy(**policy), site, rounds=1)
    account.check_cases("training")
    account.enter(Reply(PREPARE, num_samples=1))


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
        max_epsilon=100.0,
        clip={"intensity_mean": (0, 1), "intensity_std": (0.01, 1)},
        cases_per_patient=allowed,
    )
    config = tiny_config("fedrdn", classes=("background", "lesion"))
    reply = Site("A", SiteTrainer(config, folder, "cpu", policy=policy)).answer(Request(PREPARE))
    if sent:
        assert reply.error == ""
        assert set(reply.payload) == {"fedrdn/mean", "fedrdn/std", "fedrdn/count"}
        assert "constant_channels" not in reply.metrics["input"]
    else:
        words = "site A: fedrdn: a patient has 2 training cases, and noise would hide 1 (cases_per_patient of"
        assert reply.error.startswith(words)
        assert not reply.payload


def test_a_patient_who_leaves_with_all_images_is_one_patient(of_patients):
    ledger, four = PrivacyLedger(), range(4)
    everybody = {f"p{n}": four for n in range(8)}
    sent(ledger, "first", of_patients(everybody), min_images=3)
    for other in (
        {name: numbers for name, numbers in everybody.items() if name != "p7"},
        {**everybody, "p7": range(4, 8)},  # other images of the same patient
        {**everybody, "new": four},
        {name: range(2) if name < "p2" else numbers for name, numbers in everybody.items()},  # of two
    ):
        with pytest.raises(
            PrivacyRefused, match=r"training cases differ by [12] patients? from .* job first"
        ):
            sent(ledger, "second", of_patients(other), min_images=3)
    sent(
        ledger, "second", of_patients({name: everybody[name] for name in sorted(everybody)[:5]}), min_images=3
    )


def test_cases_that_name_no_patient_count_as_they_are(of_patients):
    ledger = PrivacyLedger()
    sent(ledger, "first", of_patients({"": range(30)}))
    sent(ledger, "second", of_patients({"": range(20)}))
    with pytest.raises(PrivacyRefused, match="training cases differ by 9 from those of job second"):
        sent(ledger, "third", of_patients({"": range(11)}))


def test_images_of_a_patient_share_a_budget(of_patients):
    ledger = PrivacyLedger()
    spent = [
        ledger.spend(1.0, 1e-5, 100.0, case_identities(of_patients(patients), "training"))
        for patients in ({"a": range(1), "b": range(1)}, {"b": range(1, 2)}, {"": range(2)})
    ]
    assert spent[1] > spent[0]
    assert spent[2] == pytest.approx(spent[0])


def test_a_mean_over_images_of_too_few_patients_stays_at_the_site():
    cases = {f"image {n}": n / 20 for n in range(12)}
    scores = {"dice": 0.5, "nsd": 0.5, "cases": cases, "case_metrics": {"nsd": {**cases, "image 11": None}}}
    patients = {name: n // 2 if n < 4 else n for n, name in enumerate(cases)}
    policy = PrivacyPolicy(min_images=10)
    alone = released_scores(scores, policy, dict.fromkeys(cases, 0))
    assert (alone["dice"], alone["nsd"], "scored_cases" in alone) == (None, None, False)
    assert alone["note"].startswith("fewer than 10 patients with a score, and this site sends means from 10")
    enough = released_scores(scores, policy, patients)  # of 10 patients, of whom 9 have an NSD
    assert enough["dice"] is not None
    assert enough["nsd"] is None
    assert "note" not in enough
    assert released_scores(scores, policy)["nsd"] is not None


class _Summary(SiteExchange):
    """Means over so many cases; without a number over all of them."""

    def __init__(self, summarises: int | None) -> None:
        self.cases_per_value = summarises

    def collect(self):
        return {}

    def apply(self, payload):
        raise AssertionError


@pytest.mark.parametrize(
    ("summarises", "per_patient", "patients"),
    [
        (None, (3, 3, 3, 3), 4),
        (5, (1, 4, 2, 1), 2),
        (7, (1, 4, 2, 1), 3),
        (9, (1, 4, 2, 1), 4),
        (1, (2, 2), 1),
    ],
)
def test_statistics_are_counted_by_patients(summarises, per_patient, patients):
    def check(least):
        guard = PrivacyGuard("A", PrivacyPolicy(min_images=least), sum(per_patient), per_patient=per_patient)
        guard.check("m", _Summary(summarises))

    check(patients)
    with pytest.raises(PrivacyRefused, match=f"m's statistics would summarise {patients} patients?, and"):
        check(patients + 1)


def test_a_site_counts_its_patients_before_statistics_leave(make_site, tiny_config):
    folder = make_site("A", cases=(4, 1, 1))
    content = json.loads((folder / "dataset.json").read_text())
    for row, patient in zip(content["training"], "abbb", strict=True):
        row["patient"] = patient
    (folder / "dataset.json").write_text(json.dumps(content))
    config = tiny_config("fedrdn", classes=("background", "lesion"))
    trainer = SiteTrainer(config, folder, "cpu", policy=PrivacyPolicy(min_images=3))
    error = Site("A", trainer).answer(Request(PREPARE)).error
    assert "fedrdn's statistics would summarise 2 patients, and this site sends them from 3 on" in error


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


def test_an_empty_name_is_no_patient(make_site):
    folder = make_site("A")
    content = json.loads((folder / "dataset.json").read_text())
    for split, name in (("training", ""), ("validation", "  "), ("test", None)):
        for row in content[split]:
            row["patient"] = name
    (folder / "dataset.json").write_text(json.dumps(content))
    site = VolumeFolder.open(folder)
    assert {case.patient for cases in site.cases.values() for case in cases} == {""}


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


def test_a_run_records_which_scored_cases_are_of_one_patient_and_no_name(
    tested_patients, make_site, tiny_config
):
    folder, whose = tested_patients
    make_site("B")
    config = tiny_config("fedavg", classes=("background", "lesion"), rounds=1, local_steps=1)
    results = run_in_process(config, folder.parent, ["A", "B"], "cpu").results()
    entry = results["test"]["sites"]["A"]
    assert together(entry["patients"]) == whose
    assert entry["patients"].keys() == entry["cases"].keys()
    assert "patients" not in results["test"]["sites"]["B"]  # which names nobody
    assert "Meyer" not in json.dumps(results)


def test_an_evaluation_records_which_scored_cases_are_of_one_patient(
    tested_patients, make_site, tiny_config, tmp_path
):
    folder, whose = tested_patients
    make_site("B")
    config = tiny_config("fedavg", classes=("background", "lesion"), rounds=1, local_steps=1)
    simulate(folder.parent, tmp_path / "run", config, engine="inprocess", device="cpu", report=False)
    model = tmp_path / "run/global_model.pt"
    plain = evaluate_model(model, folder.parent, device="cpu")["sites"]["A"]
    assert together(plain["patients"]) == whose
    names = Pseudonyms(b"key")
    hidden = evaluate_model(model, folder.parent, device="cpu", pseudonyms=names)["sites"]["A"]
    assert hidden["patients"].keys() == hidden["cases"].keys() == {names.of(case) for case in plain["cases"]}
    assert sorted(map(len, together(hidden["patients"]))) == [1, 2, 3]


def test_the_least_number_of_cases_of_a_job_is_one_of_patients():
    rules = JobRules(min_cases=3)
    rules.check_cases("A", (1, 1, 1))
    with pytest.raises(JobRefused, match=r"12 cases of 2 patients would train.* rule min_cases is 3"):
        rules.check_cases("A", (10, 2))
    with pytest.raises(JobRefused, match="2 cases would train, and"):
        rules.check_cases("A", (1, 1))


def test_of_patients_only_what_belongs_together_leaves_with_pseudonyms():
    scores = {"dice": 0.5, "cases": {"Zorn_1": 0.1, "Alt_1": 0.2, "Meyer_1": 0.4, "Meyer_2": None}}
    patients = {"Zorn_1": 7, "Alt_1": 0, "Meyer_1": 5, "Meyer_2": 5, "not scored": 9}
    released = released_scores(scores, PrivacyPolicy(scores="cases"), patients)
    assert released["patients"].keys() == scores["cases"].keys()
    assert "patients" not in released_scores(scores, PrivacyPolicy(scores="cases"), {})
    assert "patients" not in released_scores(scores, PrivacyPolicy(min_images=1), patients)
    names = Pseudonyms(b"key")
    sent = names.scores(released)
    pseudonyms = {name: names.of(name) for name in scores["cases"]}
    assert {frozenset(cases) for cases in together(sent["patients"])} == {
        frozenset({pseudonyms["Meyer_1"], pseudonyms["Meyer_2"]}),
        frozenset({pseudonyms["Zorn_1"]}),
        frozenset({pseudonyms["Alt_1"]}),
    }
    # In the order of the pseudonyms: the site's own order may be that of names.
    assert list(dict.fromkeys(sent["patients"][case] for case in sorted(sent["cases"]))) == [0, 1, 2]


def test_a_site_compares_models_patient_by_patient(tested_patients, tiny_config):
    folder, whose = tested_patients
    config = tiny_config("fedavg", classes=("background", "lesion"))
    ours = {case: 0.5 + 0.01 * k for k, case in enumerate(sorted(set().union(*whose)))}
    theirs = {case: 0.4 + 0.02 * k for k, case in enumerate(sorted(ours, reverse=True))}
    means = [[sum(by[case] for case in own) / len(own) for own in whose] for by in (ours, theirs)]
    expected = compare_patients(*means)

    def compared(**policy):
        trainer = SiteTrainer(config, folder, "cpu", policy=PrivacyPolicy(**policy))
        trainer.open("")
        site = EvaluationSite("A", {FEDERATION: trainer}).runs[FEDERATION]
        for model, scores in (("global", ours), ("local", theirs)):
            site.scored[model] = _Scored(ScoreRequest("test", model), scores)
        return site._compared("global", "local")

    detailed = compared(scores="cases")
    assert (detailed["difference"], detailed["p"]) == pytest.approx((expected.difference, expected.p))
    assert (detailed["patients"], "cases" in detailed) == (3, False)
    assert compared(min_images=4) == {}
    assert compared(min_images=3).keys() == {"patients", "difference", "low", "high"}  # and no p
