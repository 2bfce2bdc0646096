"""`medfedaug monitor`: accepted cases, the course of later ones, and what a user sees."""

import json
import re
import shutil
import stat
import subprocess

import nibabel
import numpy as np
import pytest

from medfedaug.data.phantom import make_phantom
from medfedaug.errors import ConfigError
from medfedaug.hospital.assurance.monitor_page import conclusions
from medfedaug.hospital.assurance.monitoring import Monitor

INPUTS = {"model": "a1", "site": "A", "statistics": None, "series": None}


def cases(first, last, shift=0.0):
    """Entries of ``predictions.json`` of the cases of these numbers."""
    entries = {}
    for number in range(first, last):
        noise, contrast, size = np.random.default_rng(number).normal(size=3)
        entries[f"case {number:03d}"] = {
            "image": {"intensity 50%": 100 + noise, "noise": float(np.exp(0.1 * contrast + shift))},
            "voxels": {"background": 1000, "lesion": 10},
            "volume_ml": {"lesion": float(np.exp(size))},
            "confidence": {"lesion": 0.8 + 0.01 * noise},
            "written": [],
        }
    return entries


@pytest.fixture
def accepted() -> Monitor:
    monitor = Monitor(INPUTS, {"case": 20.0, "drift": 1.0})
    assert monitor.accept(cases(0, 60)) == {}
    return monitor


def test_an_accepted_case_is_no_later_case(accepted):
    accepted.add(cases(0, 60))
    assert (accepted.cases, accepted.shown) == ([], [])


def test_an_image_under_another_name_counts_once(accepted):
    accepted.add(cases(60, 61))
    accepted.add({"again": cases(60, 61)["case 060"]})
    assert [case.name for case in accepted.cases] == ["case 060"]


def test_a_case_that_came_before_is_shown_again(accepted, tmp_path):
    accepted.add(cases(60, 62))
    accepted.write(tmp_path / "monitor.json")
    again = Monitor.read(tmp_path / "monitor.json", INPUTS)
    again.add(cases(61, 62))
    assert [case.name for case in again.shown] == ["case 061"]


def test_two_calls_give_the_evidence_of_one(accepted, tmp_path):
    accepted.add(cases(60, 70))
    accepted.write(tmp_path / "monitor.json")
    later = Monitor.read(tmp_path / "monitor.json", INPUTS)
    later.add(cases(70, 80))
    together = Monitor(INPUTS, {"case": 20.0, "drift": 1.0})
    together.accept(cases(0, 60))
    together.add(cases(60, 80))
    assert [(c.p, c.share) for c in later.cases] == [(c.p, c.share) for c in together.cases]


def test_a_drift_names_its_measure(accepted):
    accepted.add(cases(60, 90, shift=1.0))
    assert accepted.drift is not None
    assert accepted.drift.measures[0] == "noise"


def test_the_alarm_of_a_drift_stays(accepted):
    accepted.add(cases(60, 90, shift=1.0))
    drift = accepted.drift
    accepted.add(cases(90, 200))
    assert accepted.drift == drift


def test_a_case_that_stands_out_names_what_differs(accepted):
    accepted.add(cases(60, 61, shift=2.0))
    (case,) = accepted.outside(accepted.shown)
    assert re.match(r"noise [\d.]+ \(accepted: [\d.]+ to [\d.]+\)$", accepted.differences(case))


def test_with_too_few_accepted_cases_the_rule_by_case_says_how_many_it_needs():
    monitor = Monitor(INPUTS, {"case": 20.0, "drift": 1.0})
    monitor.accept(cases(0, 48))
    assert "20 per thousand cases need 49 accepted cases; 48 allow 20.4" in conclusions(monitor)[-1]


def test_with_too_few_accepted_cases_no_case_stands_out():
    monitor = Monitor(INPUTS, {"case": 20.0, "drift": 1.0})
    monitor.accept(cases(0, 48))
    monitor.add(cases(60, 61, shift=9.0))
    assert monitor.outside(monitor.cases) == []


def test_a_class_that_is_not_predicted_has_no_confidence(accepted):
    entries = cases(60, 61)
    entries["case 060"]["confidence"] = {}
    accepted.add(entries)
    assert accepted.cases[0].values[accepted.measures.index("confidence of lesion")] == 0


def test_the_probabilities_of_classes_are_measures():
    monitor = Monitor(INPUTS, {"case": 20.0, "drift": 1.0})
    shares = {"probabilities": {"cat": 0.3, "dog": 0.7}}
    monitor.accept({f"{n}": {"image": {"noise": n}, **shares} for n in range(1, 12)})
    assert monitor.measures == ["noise", "probability of cat", "probability of dog"]


def test_a_case_with_other_measures_is_named(accepted):
    entries = cases(60, 61)
    del entries["case 060"]["image"]["noise"]
    assert accepted.add(entries) == {"case 060": "differs from the accepted cases in what it has: noise"}


def test_nine_cases_are_no_reference():
    with pytest.raises(ConfigError, match="9 accepted cases are here; a reference needs 10"):
        Monitor(INPUTS, {"case": 20.0, "drift": 1.0}).accept(cases(0, 9))


def test_another_model_is_refused(accepted, tmp_path):
    accepted.write(tmp_path / "monitor.json")
    with pytest.raises(ConfigError, match=r"accepted with another model \(a1, and now b2\)"):
        Monitor.read(tmp_path / "monitor.json", {**INPUTS, "model": "b2"})


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content["reference"][0]["values"].pop(),
        lambda content: content["reference"][0]["values"].__setitem__(0, float("nan")),
        lambda content: content.pop("rates"),
        lambda content: content.update(version=9),
    ],
)
def test_a_damaged_file_is_refused(accepted, tmp_path, change):
    file = tmp_path / "monitor.json"
    accepted.write(file)
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="move it away, and accept cases anew"):
        Monitor.read(file, INPUTS)


def test_the_file_is_its_owners(accepted, tmp_path):
    accepted.write(tmp_path / "monitor.json")
    assert stat.S_IMODE((tmp_path / "monitor.json").stat().st_mode) == 0o600


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Sixteen accepted images, four like them, and four inverted ones."""
    root = tmp_path_factory.mktemp("images")
    make_phantom(root / "data", sites=2, patients=24, shape=(32, 32, 2), seed=3, inverted=(False, True))
    parts = {"accepted": ("A", 0, 16), "later": ("A", 16, 20), "inverted": ("B", 20, 24)}
    for name, (site, first, last) in parts.items():
        (root / name).mkdir()
        for file in sorted((root / f"data/site_{site}/images").iterdir())[first:last]:
            shutil.copy(file, root / name / f"{name}_{file.name}")
    return root


@pytest.fixture(scope="module")
def watched(images, model, tmp_path_factory):
    """The folder and the three calls' exit codes and texts: accepted, like them, inverted."""
    from running import command

    out = tmp_path_factory.mktemp("watched") / "out"
    calls = {}
    for name, more in (("accepted", ("--accept", "--case-rate", 60)), ("later", ()), ("inverted", ())):
        reports = ("--json", out.with_name(f"{name}.json"), "--metrics", out.with_name(f"{name}.prom"))
        calls[name] = command("monitor", model, "--data", images / name, "--out", out, *more, *reports)
    return out, calls


def test_accepted_cases_are_no_alarm(watched):
    code, printed, err = watched[1]["accepted"]
    assert (code, "16 cases are accepted." in printed) == (0, True), err


def test_inverted_images_stand_out_with_exit_code_3(watched):
    code, printed, _ = watched[1]["inverted"]
    assert (code, "4 of 4 cases in this call stand out" in printed) == (3, True)


def test_the_json_file_has_the_cases_of_the_call(watched):
    content = json.loads(watched[0].with_name("inverted.json").read_text())
    assert [entry["stands_out"] for entry in content["cases"].values()] == [True] * 4


def test_the_page_shows_the_cases_that_stand_out(watched):
    page = (watched[0] / "monitor.html").read_text()
    assert page.count("data:image/jpeg") == 4


def test_the_metrics_are_prometheus_text(watched):
    program = shutil.which("promtool")
    if not program:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    text = watched[0].with_name("inverted.prom").read_text()
    done = subprocess.run([program, "check", "metrics"], input=text, capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_the_metrics_count_all_later_cases(watched):
    text = watched[0].with_name("inverted.prom").read_text()
    assert 'medfedaug_monitor_cases_total{site=""} 8\n' in text


def test_a_reference_is_not_overwritten(watched, images, model, run):
    code, _, err = run("monitor", model, "--data", images / "later", "--out", watched[0], "--accept")
    assert (code, "remove it to accept other cases" in err) == (2, True)


def test_a_damaged_image_is_not_accepted(images, model, run, tmp_path):
    folder = shutil.copytree(images / "later", tmp_path / "images")
    (folder / "damaged.nii.gz").write_bytes(b"no image")
    code, _, err = run("monitor", model, "--data", folder, "--out", tmp_path / "out", "--accept")
    assert (code, "nothing is accepted" in err, (tmp_path / "out/monitor.json").exists()) == (2, True, False)


def test_rates_are_chosen_with_the_reference(images, model, run, tmp_path):
    code, _, err = run("monitor", model, "--data", images, "--out", tmp_path, "--drift-rate", 5)
    assert (code, "chosen with --accept" in err) == (2, True)


def test_a_first_call_without_accepted_cases_says_what_to_do(images, model, run, tmp_path):
    code, _, err = run("monitor", model, "--data", images / "later", "--out", tmp_path / "out")
    assert (code, "make it of accepted cases with --accept" in err) == (2, True)


def test_a_run_with_layers_of_sites_needs_the_site(images, fedbn_model, run, tmp_path):
    code, _, err = run("monitor", fedbn_model, "--data", images / "later", "--out", tmp_path, "--accept")
    assert (code, "give --site NAME" in err) == (2, True)


def test_an_archive_gives_the_images(orthanc, model, run, tmp_path):
    pytest.importorskip("highdicom", reason="pip install 'medfedaug[pacs]'")
    from dicom_files import write_slices

    names = [f"WATCHED-{n}" for n in range(10)]
    for n, name in enumerate(names):

        def named(header, k, name=name):
            header.PatientID, header.AccessionNumber = name, name

        voxels = np.random.default_rng(n).integers(0, 1000, (32, 32, 2)).astype(np.int16)
        write_slices(tmp_path / "in" / name, voxels, change=named)
    orthanc.put(tmp_path / "in")
    (tmp_path / "studies.csv").write_text("AccessionNumber\n" + "\n".join(names) + "\n")
    call = ("--dicomweb", orthanc.dicomweb, "--studies", tmp_path / "studies.csv", "--out", tmp_path / "out")
    code, printed, err = run("monitor", model, *call, "--accept")
    assert (code, printed.count("10 cases are accepted.")) == (0, 1), err


def test_a_case_has_measures_of_its_image(watched, images):
    entry = json.loads((watched[0] / "predicted/predictions.json").read_text())["cases"]
    file = next(iter((images / "later").iterdir()))
    spacing = nibabel.load(file).header.get_zooms()[0]
    measures = entry[file.name.removesuffix(".nii.gz")]["image"]
    assert measures["voxel size, left-right"] == pytest.approx(spacing, rel=1e-4)
