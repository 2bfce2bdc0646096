"""What a run did not write is neither deleted nor replaced."""

import json

import pytest
import torch
from running import TINY_OPTIONS

from medfedaug.federation.job_folder import FINAL_MODEL, GLOBAL_MODEL, server_checkpoint
from medfedaug.federation.messages.checkpoint import load_checkpoint
from medfedaug.runs.folder import make_workspace, only_process
from medfedaug.simulate import simulate


def command(data, out, *extra, methods="fedavg"):
    return [
        *("simulate", "--data", data, "--out", out, "--methods", methods, "--rounds", 1, "--threads", 1),
        *TINY_OPTIONS,
        *("--engine", "inprocess", "--device", "cpu", "--no-report", *extra),
    ]


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def foreign_state(tmp_path):
    """A folder `state` of somebody else, with a cache of tensors as MONAI names them."""
    out = tmp_path / "out"
    cache = out / "state" / "cache"
    cache.mkdir(parents=True)
    (out / "state" / "notes.txt").write_text("mine")
    (out / "state" / "empty").mkdir()
    torch.save({"mine": torch.ones(2)}, cache / f"{'0123456789abcdef' * 2}.pt")
    return out, contents(out)


@pytest.mark.parametrize(("methods", "extra"), [("fedavg", ["--overwrite"]), ("fedbn", [])])
def test_a_state_folder_of_somebody_else_stays(run, phantom_dir, foreign_state, methods, extra):
    out, before = foreign_state
    run.ok(*command(phantom_dir, out, *extra, methods=methods))
    assert contents(out).items() >= before.items()
    assert (out / "state" / "empty").is_dir()
    assert not server_checkpoint(out / "state").exists()
    kept = list((out / "state").glob("site_*/*"))
    assert bool(kept) == (methods == "fedbn")


@pytest.mark.parametrize("extra", [[], ["--overwrite"]])
def test_a_run_that_fails_deletes_nothing(run, phantom_dir, foreign_state, extra):
    out, before = foreign_state
    err = run.refused(*command(phantom_dir, out, *extra, "--min-sites", 3))
    assert "the federation needs 3" in err
    assert contents(out) == before
    assert (out / "state" / "empty").is_dir()


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        *((name, []) for name in ("statistics.json", "report.html", "global_model.pt", "nvflare.log")),
        *(("results.json", extra) for extra in ([], ["--overwrite"], ["--resume"])),
    ],
)
def test_a_file_of_somebody_else_is_not_replaced(run, phantom_dir, tmp_path, name, extra):
    out = tmp_path / "out"
    out.mkdir()
    (out / name).write_text('{"mine": 1}')
    err = run.refused(*command(phantom_dir, out, *extra))
    assert f"{out / name} is not of a run; choose another folder" in " ".join(err.split())
    assert contents(out) == {out / name: b'{"mine": 1}'}


def test_overwriting_deletes_the_earlier_run_and_no_more(run, phantom_dir, tmp_path):
    out = tmp_path / "out"
    assert run(*command(phantom_dir, out, methods="fedbn"))[0] == 0
    earlier = json.loads((out / "results.json").read_text())["run"]
    assert len(list(out.glob(f"state/*/{earlier}.pt"))) == 3
    foreign = [
        out / "notes.txt",
        out / ".lock",
        out / "state" / "mine.txt",
        out / "state" / "site_A" / "mine",
    ]
    foreign.append(tmp_path / ".out-abcdefgh" / "mine")
    for path in foreign:
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text("mine")
    run.ok(*command(phantom_dir, out, "--overwrite", "--report", "--no-pictures"))
    assert all(path.read_text() == "mine" for path in foreign)
    assert not list(out.glob("state/**/*.pt"))
    assert {path.name for path in out.iterdir()} >= {"results.json", "global_model.pt", "report.html"}


def test_resuming_clears_what_a_killed_process_left_and_no_more(phantom_dir, tmp_path, tiny_config):
    out, foreign = tmp_path / "out", tmp_path / ".out-abcdefgh"
    foreign.mkdir()
    (foreign / "mine").touch()
    options = {"engine": "inprocess", "device": "cpu"}

    def interrupt(event):
        if event["event"] == "round_started" and event["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(phantom_dir, out, tiny_config(), **options, on_event=interrupt)
    assert load_checkpoint(server_checkpoint(out / "state"))["round"] == 1
    make_workspace(out)  # left by a process that was killed
    (out / "state" / "server" / ".medfedaug.pt.abcdefgh").touch()  # a checkpoint in the middle
    (out / "state" / "mine.txt").touch()
    simulate(phantom_dir, out, tiny_config(), **options, resume=True)
    assert list(tmp_path.glob(".out-*")) == [foreign]
    assert [path.name for path in (out / "state").iterdir()] == ["mine.txt"]


def test_scores_page_and_tables_replace_nothing_else(run, phantom_dir, tmp_path):
    out, mine = tmp_path / "out", tmp_path / "mine"
    assert run(*command(phantom_dir, out))[0] == 0
    mine.write_text("mine")
    for args in (
        ("evaluate", "--model", out / "global_model.pt", "--data", phantom_dir, "--device", "cpu"),
        ("report", out),
    ):
        err = run.refused(*args, "--out", mine)
        assert f"{mine} " in " ".join(err.split())
        assert mine.read_text() == "mine"
        assert run(*args, "--out", tmp_path / args[0])[0] == 0
        assert run(*args, "--out", tmp_path / args[0])[0] == 0


@pytest.fixture
def finished(write):
    """A finished run with both models, a site's state, and the workspace of a killed process."""
    folder = write(methods=("fedavg",), scores={"DU": 0.5, "HT": 0.6})
    for name in (
        GLOBAL_MODEL,
        FINAL_MODEL,
        "state/DU/layers.pt",
        f"../.{folder.name}-abcdefgh/.medfedaug-run",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x" * 2000)
    return folder


def test_clean_lists_what_it_would_free_and_frees_nothing(run, finished):
    before = contents(finished.parent)
    code, out, err = run("clean", finished)
    assert code == 0, err
    assert "would free: 4.0 kB of 1 run; --yes frees it" in out
    assert contents(finished.parent) == before


def test_clean_frees_the_last_model_and_workspaces_and_nothing_else(run, finished):
    before = contents(finished.parent)
    code, _, err = run("clean", finished, "--yes")
    assert code == 0, err
    gone = {path.name for path in before.keys() - contents(finished.parent).keys()}
    assert gone == {FINAL_MODEL, ".medfedaug-run"}


def test_clean_keeps_the_only_model_of_a_run(run, finished):
    (finished / GLOBAL_MODEL).unlink()
    assert run("clean", finished, "--yes")[0] == 0
    assert (finished / FINAL_MODEL).exists()


def test_clean_leaves_a_run_that_is_being_made(run, finished):
    with only_process(finished):
        code, _, err = run("clean", finished, "--yes")
    assert code == 2
    assert "another process is making this run" in " ".join(err.split())
    assert (finished / FINAL_MODEL).exists()
