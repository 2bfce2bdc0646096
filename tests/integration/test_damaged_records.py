"""Files that somebody has changed: a command uses them, or refuses in one line that names the file."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from changed_records import SEEDS, TEXTS, changes
from finished_runs import simulated
from running import TINY_OPTIONS, command

from medfedaug.config.plan import Plan

FEW = 3  # of what takes half a second or more


@dataclass(frozen=True)
class Made:
    """Folders and files of a federation: those of a run, of its evaluation, and of a prediction with it."""

    data: Path
    run: Path
    evaluation: Path
    predicted: Path


@pytest.fixture(scope="module")
def made(phantom_dir, tmp_path_factory) -> Made:
    root = tmp_path_factory.mktemp("damaged")
    run = root / "run"
    code, _, err = command(*trained(run, phantom_dir))
    assert code == 0, err
    single = simulated(phantom_dir, root / "single", "single", "--limit", 2)
    evaluation, predicted = root / "evaluation.json", root / "predicted"
    code, _, err = command(
        *("evaluate", "--model", run / "global_model.pt", "--data", phantom_dir, "--local", single),
        *("--out", evaluation),
    )
    assert code == 0, err
    code, _, err = command(*predict(run, phantom_dir, predicted))
    assert code == 0, err
    return Made(phantom_dir, run, evaluation, predicted)


def trained(out: Path, data: Path) -> tuple[object, ...]:
    """The command that makes the run, or shows it once more."""
    return (
        *("simulate", "--data", data, "--methods", "fedbn,fedfa", "--out", out, "--engine", "inprocess"),
        *("--rounds", 2, "--threads", 1, "--batch-size", 4, "--no-report", "--limit", 2),
        *TINY_OPTIONS,
    )


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


@pytest.mark.parametrize("seed", SEEDS)
def test_a_changed_evaluation(run, made, tmp_path, seed):
    file = tmp_path / "evaluation.json"
    for place, changed in changes(json.loads(made.evaluation.read_text()), f"evaluation {seed}", FEW):
        file.write_text(json.dumps(changed))
        options = ("--out", tmp_path / "page.html", "--tables", tmp_path / "tables")
        used_or_one_line(run("report", file, *options), "evaluation.json", place)


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
            assert "a file below the folder was expected" in err
            assert (tmp_path / "precious.nii.gz").read_bytes() == b"precious"
            shutil.rmtree(out)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_changed_prediction_is_continued_or_refused(run, made, tmp_path, seed):
    out = shutil.copytree(made.predicted, tmp_path / "out")
    content = json.loads((made.predicted / "predictions.json").read_text())
    for place, changed in changes(content, f"predictions {seed}", FEW):
        (out / "predictions.json").write_text(json.dumps(changed))
        result = run(*predict(made.run, made.data, out))
        if f"{out} holds predictions with other " not in result[2]:
            used_or_one_line(result, "predictions.json", place)


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


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("part", ["train", "test"])
def test_a_changed_list_of_images_is_used_or_refused(run, make_photos, tmp_path, part, seed):
    make_photos("A")
    splits = tmp_path / "photos/splits"
    splits.mkdir()
    lists = {"train": [0, 1, 2], "test": [3, 4]}
    for name, numbers in lists.items():
        listed = [[f"A/{label}/{n}.png", label, f"p{n}"] for n in numbers for label in ("cat", "dog")]
        (splits / f"A_{name}.json").write_text(json.dumps(listed))
    content = json.loads((splits / f"A_{part}.json").read_text())
    for place, changed in changes(content, f"{part} {seed}"):
        (splits / f"A_{part}.json").write_text(json.dumps(changed))
        result = run("inspect", "--data", tmp_path / "photos", "--out", tmp_path / "inspect.html")
        used_or_one_line(result, f"A_{part}.json", place)


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
