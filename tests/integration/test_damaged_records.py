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
from medfedaug.utils.event_schema import EVENTS
from medfedaug.utils.event_text import EventLines

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


EVENTS_OF_A_JOB: list[dict[str, object]] = [
    {"event": "stage", "text": "preparing"},
    {"event": "unseen", "site": "D"},
    {"event": "prepared", "site": "A", "samples": 12},
    {"event": "planned", "reasons": [["spacing", "the median"]]},
    {"event": "constant_channels", "site": "A", "channels": [0]},
    {"event": "missing_channels", "site": "A", "channels": ["T1"]},
    {"event": "init", "loaded": 3, "of": 4, "file": "a.pt", "skipped": {"head": "its shape"}},
    {"event": "uneven", "site": "A", "reason": "two scales"},
    {"event": "left_out", "site": "E", "reason": "it is down"},
    {"event": "resumed", "round": 1, "rounds": 3},
    {"event": "share_lowered", "site": "A", "before": 0.6, "after": 0.4},
    {"event": "round_started", "round": 2, "rounds": 3},
    {"event": "trained", "round": 2, "site": "A", "train_loss": 0.5, "samples": 12},
    {"event": "refused", "round": 2, "site": "B", "reason": "NaN"},
    {"event": "step_shortened", "round": 2, "site": "B", "parameters": 9.0, "buffers": 2.0, "cosine": 0.5},
    {"event": "suspected", "round": 2, "site": "B", "reason": "backwards"},
    {"event": "missing", "round": 2, "task": "train", "site": "B", "reason": "no answer"},
    {"event": "away", "site": "B", "seconds": 60},
    {"event": "waiting", "sites": ["B"], "answers": 1, "needed": 2},
    {"event": "returned", "site": "B"},
    {"event": "unscored", "site": "A", "reason": "few cases"},
    {
        "event": "round_finished",
        "round": 2,
        "seconds": 3.5,
        "samples": 12,
        "bytes": {"w": {"up": 1, "down": 2}},
    },
    {"event": "validated", "round": 2, "val_dice": 0.4},
    {"event": "warning", "text": "odd"},
    {"event": "not_answered", "task": "test", "reason": "no"},
    {
        **{"event": "answered", "task": "train", "round": 2, "rounds": 3, "samples": 12, "cases": 4},
        **{"scores": {"train_loss": 0.4, "val_dice": 0.3}, "seconds": 2.5, "model": 100},
        **{"statistics": {"fedfa": 10}, "unscored": "few"},
    },
    {"event": "tested", "site": "A", "dice": 0.5},
    {"event": "labelled", "site": "A", "classes": "lesion"},
    {"event": "stalled", "round": 2, "reason": "flat"},
    {"event": "ended"},
    {"event": "failed", "message": "no site"},
    {"event": "finished"},
]
"""One of each kind, as server and sites write them."""


def test_every_event_with_a_line_has_a_structure():
    events = {name.removeprefix("_") for name in vars(EventLines) if name.startswith("_") and name[1] != "_"}
    assert events - {"of"} <= set(EVENTS)
    assert {event["event"] for event in EVENTS_OF_A_JOB} == set(EVENTS)


@pytest.mark.parametrize("event", EVENTS_OF_A_JOB, ids=lambda event: event["event"])
def test_a_changed_event_is_shown_or_refused(run, tmp_path, event):
    job = tmp_path / "job/medfedaug"
    job.mkdir(parents=True)
    for place, changed in changes(event, event["event"], 15):
        lines = [*EVENTS_OF_A_JOB[:13], event, changed, event, *EVENTS_OF_A_JOB[20:22]]
        (job / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        result = run("site", "watch", tmp_path, "--once")
        if result[0] == 1 and not result[2]:
            continue  # the job failed, which is no fault of the file
        used_or_one_line(result, "events.jsonl", place)


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
