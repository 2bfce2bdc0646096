"""Files that somebody has changed: a command uses them, or refuses in one line that names the file."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from changed_records import SEEDS, TEXTS, changes
from finished_runs import FEW, simulated
from running import command

from medfedaug.config.plan import Plan


@dataclass(frozen=True)
class Made:
    """Folders and files of a federation: those of a run and of a prediction with it."""

    data: Path
    run: Path
    predicted: Path


@pytest.fixture(scope="module")
def made(phantom_dir, tmp_path_factory) -> Made:
    root = tmp_path_factory.mktemp("damaged")
    run, predicted = simulated(phantom_dir, root / "run", "fedbn,fedfa", *FEW), root / "predicted"
    code, _, err = command(*predict(run, phantom_dir, predicted))
    assert code == 0, err
    return Made(phantom_dir, run, predicted)


def predict(run: Path, data: Path, out: Path) -> tuple[object, ...]:
    """The command that predicts a site's images, or goes on with it."""
    site = ("--images", data / "site_A", "--site", "site_A")
    return ("predict", "--model", run, *site, "--device", "cpu", "--out", out)


def used_or_one_line(result: tuple[int, str, str], name: str, place: object) -> None:
    """Check that a command went on, or ended in one line that names the file; an exception fails the test."""
    code, out, err = result
    assert code in (0, 1, 2), (place, err)
    assert "Traceback" not in out + err, place
    if code:
        last = err.strip().splitlines()[-1]
        assert last.startswith("medfedaug: "), (place, err)
        assert name in last, (place, err)
        assert len(last) < 600, (place, last)


def test_a_changed_prediction_deletes_nothing_else(run, made, tmp_path):
    """--overwrite deletes the files that the record names; they lie below the folder of predictions."""
    (tmp_path / "precious.nii.gz").write_bytes(b"precious")
    for place in ("../precious.nii.gz", str(tmp_path / "precious.nii.gz"), "previews/../../precious.nii.gz"):
        for change in (
            lambda content, place=place: content["cases"]["patient_003"].update(written=[place]),
            lambda content, place=place: content.update(pending={"patient_003": [place]}),
            lambda content, place=place: content["statistics"].update(file=place),
        ):
            out = shutil.copytree(made.predicted, tmp_path / "out")
            content = json.loads((out / "predictions.json").read_text())
            content["statistics"] = {"of": "1 image given", "mean": [0.0], "std": [1.0], "intensity": "scale"}
            change(content)
            (out / "predictions.json").write_text(json.dumps(content))
            code, _, err = run(*predict(made.run, made.data, out), "--overwrite")
            assert code == 2
            assert "predictions.json: " in err
            assert "expected a file below the folder" in err
            assert (tmp_path / "precious.nii.gz").read_bytes() == b"precious"
            shutil.rmtree(out)


PLAN = {
    "format": "medfedaug.plan",
    "version": 1,
    "plan": Plan(spatial_dims=3, orientation="RAS", spacing=(1, 1, 3), patch_size=(16, 16, 4)).to_dict(),
    "reasons": [["spacing", "the median"]],
}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_changed_plan_is_used_or_refused(run, tmp_path, seed):
    file, job = tmp_path / "plan.json", tmp_path / "job"
    for place, changed in changes(PLAN, f"plan {seed}"):
        file.write_text(json.dumps(changed))
        result = run("export", "--methods", "fedavg", "--min-sites", 2, "--plan", file, "--out", job)
        used_or_one_line(result, "plan.json", place)
        shutil.rmtree(job, ignore_errors=True)


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_that_is_no_record(run, made, tmp_path, text):
    for name in ("evaluation.json", "predictions.json", "plan.json", "results.json"):
        (tmp_path / name).write_text(text)
    job, out = tmp_path / "job/medfedaug", shutil.copytree(made.predicted, tmp_path / "out")
    job.mkdir(parents=True)
    (job / "events.jsonl").write_text(f"{text}\n")
    (out / "predictions.json").write_text(text)
    page, missing = tmp_path / "page.html", tmp_path / "none"
    for command_, name in (
        (("report", tmp_path / "evaluation.json", "--out", page), "evaluation.json"),
        (predict(made.run, made.data, out), "predictions.json"),
        (("export", "--methods", "fedavg", "--plan", tmp_path / "plan.json", "--out", missing), "plan.json"),
        (("report", tmp_path / "results.json", "--out", page), "results.json"),
    ):
        result = run(*command_)
        assert result[0] == 2, name
        used_or_one_line(result, name, text)
    assert run("site", "watch", tmp_path, "--once")[0] == 0  # a line that is cut short is no fault
